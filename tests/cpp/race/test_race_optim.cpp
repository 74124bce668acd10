// Searches the optimizers' kernels for races: runs them under ThreadSanitizer (device/order.h), which
// reports them. That results are right is for other tests.
#include <cuda_runtime.h>

#include <vector>

#include "core/optim/table.h"
#include "cuda/optim/step.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

// One parameter with gradient and states, of one storage each.
struct Parameter {
  Parameter(std::int64_t count, Storage states) : count(count), states(states) {
    for (std::vector<float>* part : {&param, &grad}) part->resize(static_cast<std::size_t>(count));
    for (int s = 0; s < kMostStates; ++s) {
      state[s].resize(static_cast<std::size_t>(count));
      largest[s].resize(static_cast<std::size_t>(count / 256 + 1));
    }
  }

  Segment segment(int kept) {
    Segment made{};
    made.param = param.data();
    made.grad = grad.data();
    for (int s = 0; s < kMostStates; ++s) {
      made.state[s] = state[s].data();
      made.largest[s] = largest[s].data();
      made.state_storage[s] = s < kept ? states : Storage::none;
    }
    made.param_storage = made.grad_storage = Storage::f32;
    made.master_storage = Storage::none;
    made.step = &step;
    made.count = count;
    return made;
  }

  std::int64_t count;
  Storage states;
  std::vector<float> param, grad, state[kMostStates], largest[kMostStates];
  float step = 0;
};

// Steps one after the other; between them the gradients are written, as by a backward.
void steps(Rule rule, int kept, bool amsgrad) {
  std::vector<Parameter> parameters;
  for (const std::int64_t count : {3000, 700, 2048}) {
    parameters.emplace_back(count, count == 700 ? Storage::code8 : Storage::f32);
  }
  std::vector<Segment> segments;
  for (Parameter& parameter : parameters) segments.push_back(parameter.segment(kept));
  cuda::SegmentTable table;
  std::vector<std::uint64_t> memory(static_cast<std::size_t>(table.set(segments)) / 8);
  float scale = 2.0f, found = 0.0f, clip = 1.0f;
  double norm = 0.0;
  Settings settings;
  settings.rule = rule;
  settings.lr = settings.eps = 0.01;
  settings.adapt = true;
  settings.amsgrad = amsgrad;
  const cuda::StepJob job{0, 0, &table, {&scale, &found, &clip}};
  table.upload(memory.data(), 0, 0);
  for (int turn = 0; turn < 2; ++turn) {
    for (Parameter& parameter : parameters) {
      cudaMemsetAsync(parameter.grad.data(), 1, parameter.grad.size() * sizeof(float), nullptr);
    }
    cuda::grad_norm(job, {1.0, true, &norm});
    cuda::step(job, {0, 2, settings, nullptr, false});
    cuda::step(job, {2, 1, settings, nullptr, false});
  }
  cudaStreamSynchronize(nullptr);
}

}  // namespace
}  // namespace pycomm::test

int main(int argc, char** argv) {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all(
      {
          {"adamw", [] { steps(Rule::adamw, 2, false); }},
          {"amsgrad", [] { steps(Rule::adamw, 3, true); }},
          {"lamb", [] { steps(Rule::lamb, 2, false); }},
          {"lion", [] { steps(Rule::lion, 1, false); }},
          {"sgd", [] { steps(Rule::sgd, 1, false); }},
      },
      argc > 1 ? argv[1] : "");
}

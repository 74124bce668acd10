// Searches the kernels of sharded steps for races: runs them under ThreadSanitizer (device/order.h), which
// reports them. That results are right is for other tests.
#include "core/optim/square_sum.h"
#include "core/optim/table.h"
#include "cuda/optim/sharded.h"
#include "race/world.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

constexpr int kParameters = 2;
// Elements that a rank owns of each parameter: enough that the second lane has some, too.
constexpr std::int64_t kPart = 5 * kSumBlock;

// One rank's memory. The arena holds sums, parameters and gradients.
struct Memory {
  explicit Memory(int n)
      : whole(n * kPart),
        begin(kParameters * kShardSums * 2 * (whole / kSumBlock)),
        arena(static_cast<std::size_t>(begin + 2 * kParameters * whole)) {
    for (std::vector<float>& part : own) part.resize(kPart);
  }
  float* parameter(int p) { return arena.data() + begin + p * whole; }
  float* gradient(int p) { return parameter(kParameters + p); }
  std::vector<float>& own_part(int p, int i) { return own[p * 2 * kMostStates + i]; }

  std::int64_t whole, begin;  // elements: of a parameter, before the first one
  std::vector<float> arena, own[kParameters * 2 * kMostStates];
  std::vector<std::uint64_t> table;
  float scale = 2, found = 0, clip = 1, steps[kParameters] = {};
  double norm = 0;
};

Shard shard_of(int kept, int r, int p, Memory& mine) {
  Shard shard{};
  Segment& part = shard.part;
  part.param = mine.parameter(p) + r * kPart;
  part.grad = mine.gradient(p) + r * kPart;
  for (int s = 0; s < kMostStates; ++s) {
    part.state[s] = mine.own_part(p, 2 * s).data();
    part.largest[s] = mine.own_part(p, 2 * s + 1).data();
    part.state_storage[s] = s < kept ? Storage::f32 : Storage::none;
  }
  part.param_storage = part.grad_storage = Storage::f32;
  part.master_storage = Storage::none;
  part.step = &mine.steps[p];
  part.count = kPart;
  part.first = r * kPart;
  shard.whole = mine.whole;
  return shard;
}

cuda::ShardedStep step_of(Rule rule, int kept, int r, Memory& mine) {
  cuda::ShardedStep step;
  Settings settings;
  settings.rule = rule;
  settings.lr = settings.eps = 0.01;
  settings.adapt = true;
  step.groups.push_back({settings, kParameters});
  for (int p = 0; p < kParameters; ++p) step.shards.push_back(shard_of(kept, r, p, mine));
  step.arena = reinterpret_cast<std::byte*>(mine.arena.data());
  step.arena_bytes = static_cast<std::int64_t>(mine.arena.size() * sizeof(float));
  step.sums = reinterpret_cast<double*>(mine.arena.data());
  step.control = {&mine.scale, &mine.found, &mine.clip};
  step.max_norm = 1.0;
  step.measures = true;
  step.norm = &mine.norm;
  return step;
}

// Ranks run steps one after the other. What a step has used belongs to its rank again afterwards: the
// gradients are written, as by a backward.
void run(Rule rule, int kept, int lanes) {
  constexpr int kRanks = 2;
  RaceWorld world(kRanks, lanes, false);
  std::vector<Memory> memory(kRanks, Memory(kRanks));
  world.run([&](int r) {
    Memory& mine = memory[static_cast<std::size_t>(r)];
    const cuda::ShardedStep step = step_of(rule, kept, r, mine);
    cuda::ShardTable table;
    mine.table.resize(static_cast<std::size_t>(table.set(step)) / 8);
    for (int turn = 0; turn < 2; ++turn) {
      table.set(step);
      table.upload(mine.table.data(), r, 0);
      const Call call = cuda::step_call(step, "step");
      world[r].launch(call.operation, call.input, call.output, 0, table.sharding());
      cudaMemsetAsync(mine.gradient(0), 1, 2 * static_cast<std::size_t>(mine.whole) * sizeof(float),
                      nullptr);
    }
  });
}

void steps(Rule rule, int kept) {
  for (const int lanes : {1, 2}) run(rule, kept, lanes);
}

}  // namespace
}  // namespace pycomm::test

int main(int argc, char** argv) {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all(
      {
          {"adamw", [] { steps(Rule::adamw, 2); }},
          {"lamb", [] { steps(Rule::lamb, 2); }},
          {"lion", [] { steps(Rule::lion, 1); }},
          {"sgd", [] { steps(Rule::sgd, 1); }},
      },
      argc > 1 ? argv[1] : "");
}

// Optimizer steps of every rule with every storage. On many threads, in random pieces, they give
// the same bits as on one thread; skipped steps change nothing. All memory has its exact size, for
// AddressSanitizer.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include "core/reduce.h"
#include "cpu/optim/loops.h"
#include "cpu/optim/step.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using Dice = std::mt19937;
using Bytes = std::vector<std::byte>;

constexpr std::int64_t kCounts[] = {0, 1, 1024, 255, 0, 4099, 1025};

// A rule, and how parameters, gradients and states are stored.
struct Form {
  std::string name;
  Settings settings;
  int states;
  Storage param, grad, master, state;
};

std::vector<Form> rules() {
  Settings adam, amsgrad, sgd, momentum, lion, lamb;
  for (Settings* s : {&adam, &amsgrad, &sgd, &momentum, &lion, &lamb}) {
    s->lr = 0.01, s->weight_decay = 0.1, s->beta1 = 0.9, s->beta2 = 0.99, s->eps = 1e-8;
  }
  amsgrad.amsgrad = amsgrad.maximize = adam.decoupled = true;
  sgd.rule = momentum.rule = Rule::sgd;
  momentum.momentum = 0.9;
  momentum.nesterov = true;
  lion.rule = Rule::lion;
  lamb.rule = Rule::lamb;
  lamb.adapt = true;
  constexpr Storage none = Storage::none;
  return {
      {"adam", adam, 2, none, none, none, none}, {"amsgrad", amsgrad, 3, none, none, none, none},
      {"sgd", sgd, 0, none, none, none, none},   {"momentum", momentum, 1, none, none, none, none},
      {"lion", lion, 1, none, none, none, none}, {"lamb", lamb, 2, none, none, none, none}};
}

std::vector<Form> forms() {
  constexpr Storage kFloats[] = {Storage::f32, Storage::f16, Storage::bf16};
  std::vector<Form> made;
  for (Form form : rules()) {
    for (const Storage param : kFloats) {
      for (const Storage grad : kFloats) {
        for (const Storage master : {Storage::none, Storage::f32, Storage::remainder}) {
          if (param == Storage::f32 && master != Storage::none) continue;
          if (param == Storage::f16 && master == Storage::remainder) continue;
          for (const Storage state : {Storage::f32, Storage::f16, Storage::bf16, Storage::code8}) {
            for (const bool stochastic : {false, true}) {
              form.param = param, form.grad = grad, form.master = master, form.state = state;
              form.settings.stochastic = stochastic;
              form.settings.seed = 5;
              made.push_back(form);
            }
          }
        }
      }
    }
  }
  return made;
}

std::string describe(const Form& form) {
  constexpr const char* names[] = {"none", "f32", "f16", "bf16", "remainder", "code8"};
  const auto name = [&](Storage storage) { return std::string(names[static_cast<int>(storage)]); };
  return form.name + ", " + name(form.param) + ", gradient " + name(form.grad) + ", master " +
         name(form.master) + ", states " + name(form.state) +
         (form.settings.stochastic ? ", stochastic" : "");
}

std::size_t bytes_of(Storage storage, std::int64_t n) {
  const std::size_t size = storage == Storage::none    ? 0
                           : storage == Storage::f32   ? 4
                           : storage == Storage::code8 ? 1
                                                       : 2;
  return size * static_cast<std::size_t>(n);
}

// A parameter with its gradient and states.
struct Parameter {
  std::int64_t count;
  Bytes param, grad, master, state[kMostStates];
  std::vector<float> largest[kMostStates];
  float step = 0;

  bool operator==(const Parameter&) const = default;
};

Bytes random_numbers(Dice& dice, Storage storage, std::int64_t n) {
  Bytes made(bytes_of(storage, n));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = std::ldexp(normal(dice), static_cast<int>(dice() % 8) - 6);
    const cpu::Numbers numbers{storage, false, made.data(), nullptr, nullptr};
    if (storage == Storage::f32) {
      reinterpret_cast<float*>(made.data())[i] = value;
    } else {
      cpu::store_chunk(numbers, i, 1, &value, nullptr);
    }
  }
  return made;
}

std::vector<Parameter> parameters(const Form& form) {
  std::vector<Parameter> made;
  Dice dice(1);
  for (const std::int64_t n : kCounts) {
    Parameter parameter{n, random_numbers(dice, form.param, n), {}, {}, {}, {}};
    parameter.master = form.master == Storage::f32 ? random_numbers(dice, form.master, n)
                                                   : Bytes(bytes_of(form.master, n));
    for (int s = 0; s < form.states; ++s) {
      parameter.state[s].resize(bytes_of(form.state, n));
      if (form.state == Storage::code8) {
        parameter.largest[s].resize(static_cast<std::size_t>((n + kStateBlock - 1) / kStateBlock));
      }
    }
    made.push_back(std::move(parameter));
  }
  return made;
}

void draw_gradients(const Form& form, unsigned seed, std::vector<Parameter>& parameters) {
  Dice dice(seed);
  for (Parameter& p : parameters) p.grad = random_numbers(dice, form.grad, p.count);
}

std::vector<Segment> segments(const Form& form, std::vector<Parameter>& parameters) {
  std::vector<Segment> made;
  for (Parameter& p : parameters) {
    Segment segment{};
    segment.param = p.param.data();
    segment.grad = p.grad.data();
    segment.master = p.master.data();
    segment.param_storage = form.param;
    segment.grad_storage = form.grad;
    segment.master_storage = form.master;
    for (int s = 0; s < form.states; ++s) {
      segment.state[s] = p.state[s].data();
      segment.largest[s] = p.largest[s].data();
      segment.state_storage[s] = form.state;
    }
    segment.step = &p.step;
    segment.count = p.count;
    segment.stream = made.size();
    made.push_back(segment);
  }
  return made;
}

void on_one_thread(std::int64_t n, const cpu::Body& body) { body(0, n); }

// Each piece gets its own thread; pieces begin anywhere.
cpu::Parallel on_threads(Dice& dice, int threads) {
  return [&dice, threads](std::int64_t n, const cpu::Body& body) {
    std::vector<std::int64_t> cuts = {0, n};
    for (int t = 1; t < threads; ++t) cuts.push_back(dice() % (n + 1));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::thread> running;
    for (std::size_t c = 1; c < cuts.size(); ++c) {
      if (cuts[c - 1] < cuts[c]) running.emplace_back(body, cuts[c - 1], cuts[c]);
    }
    for (std::thread& thread : running) thread.join();
  };
}

// Does two steps with clipping and returns the last norm.
double train(const Form& form, std::vector<Parameter>& parameters, const cpu::Parallel& parallel) {
  double norm = 0;
  for (unsigned step = 0; step < 2; ++step) {
    draw_gradients(form, 10 + step, parameters);
    const std::vector<Segment> table = segments(form, parameters);
    float scale = 4.0f, found = 0.0f, clip = 0.0f;
    const StepControl control{&scale, &found, &clip};
    norm = cpu::grad_norm(table, control, 0.5, parallel);
    PYCOMM_CHECK(found == 0.0f && clip > 0.0f && clip < 1.0f, "clipped, not skipped");
    cpu::step(form.settings, table, control, parallel);
  }
  return norm;
}

void threads_change_nothing() {
  Dice dice(0);
  for (const Form& form : forms()) {
    std::vector<Parameter> one = parameters(form), many = one;
    const std::vector<Parameter> before = one;
    const double norm = train(form, one, on_one_thread);
    PYCOMM_CHECK(train(form, many, on_threads(dice, 5)) == norm, "norms of " + describe(form));
    PYCOMM_CHECK(one == many, describe(form));
    for (std::size_t p = 0; p < one.size(); ++p) {
      PYCOMM_CHECK(one[p].step == 2.0f, "every counter counts: " + describe(form));
      PYCOMM_CHECK(one[p].count < 9 || one[p].param != before[p].param,
                   "every parameter moves: " + describe(form));
    }
  }
}

// For any non-finite value, in any element of any parameter.
void skips_touch_nothing() {
  constexpr float inf = std::numeric_limits<float>::infinity();
  Dice dice(0);
  for (const Form& form : forms()) {
    std::vector<Parameter> tensors = parameters(form);
    train(form, tensors, on_one_thread);
    for (std::size_t p = 0; p < tensors.size(); ++p) {
      if (tensors[p].count == 0) continue;
      draw_gradients(form, 20, tensors);
      const float bad = dice() % 2 == 0 ? inf : -std::nanf("");
      const std::int64_t where = dice() % tensors[p].count;
      std::vector<Segment> table = segments(form, tensors);
      if (form.grad == Storage::f32) {
        reinterpret_cast<float*>(tensors[p].grad.data())[where] = bad;
      } else {
        cpu::store_chunk({form.grad, false, tensors[p].grad.data(), nullptr, nullptr}, where, 1,
                         &bad, nullptr);
      }
      const std::vector<Parameter> before = tensors;
      float scale = 4.0f, found = 0.0f;
      const StepControl control{&scale, &found, nullptr};
      cpu::grad_norm(table, control, 0.0, on_threads(dice, 3));
      PYCOMM_CHECK(found == 1.0f, "an overflow must be found: " + describe(form));
      for (const float several : {1.0f, 2.0f, inf, std::nanf("")}) {
        found = several;
        cpu::step(form.settings, table, control, on_threads(dice, 3));
        PYCOMM_CHECK(tensors == before, "a skipped step must touch nothing: " + describe(form));
      }
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"threads change nothing", threads_change_nothing},
      {"skips touch nothing", skips_touch_nothing},
  });
}

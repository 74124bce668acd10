// What tests of optimizer steps share: every rule with every storage, parameters in memory of its exact
// size, for AddressSanitizer, and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "cpu/optim/loops.h"
#include "cpu/optim/step.h"
#include "support/dice.h"

namespace pycomm::test {

using Bytes = std::vector<std::byte>;

// A rule, and how parameters, gradients and states are stored.
struct Form {
  std::string name;
  Settings settings;
  int states;
  Storage param, grad, master, state;
};

inline std::vector<Form> rules() {
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

inline std::vector<Form> forms() {
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

inline std::string describe(const Form& form) {
  constexpr const char* names[] = {"none", "f32", "f16", "bf16", "remainder", "code8"};
  const auto name = [&](Storage storage) { return std::string(names[static_cast<int>(storage)]); };
  return form.name + ", " + name(form.param) + ", gradient " + name(form.grad) + ", master " +
         name(form.master) + ", states " + name(form.state) +
         (form.settings.stochastic ? ", stochastic" : "");
}

inline std::size_t bytes_of(Storage storage, std::int64_t n) {
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

inline Bytes random_numbers(Dice& dice, Storage storage, std::int64_t n) {
  Bytes made(bytes_of(storage, n));
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = std::ldexp(normal(dice), static_cast<int>(dice() % 8) - 6);
    const cpu::Numbers numbers{storage, Role::weight, made.data(), nullptr, nullptr};
    if (storage == Storage::f32) {
      reinterpret_cast<float*>(made.data())[i] = value;
    } else {
      cpu::store_chunk(numbers, i, 1, &value, nullptr);
    }
  }
  return made;
}

inline std::vector<Parameter> parameters(const Form& form,
                                         const std::vector<std::int64_t>& counts) {
  std::vector<Parameter> made;
  Dice dice(1);
  for (const std::int64_t n : counts) {
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

inline void draw_gradients(const Form& form, unsigned seed, std::vector<Parameter>& parameters) {
  Dice dice(seed);
  for (Parameter& p : parameters) p.grad = random_numbers(dice, form.grad, p.count);
}

inline std::vector<Segment> segments(const Form& form, std::vector<Parameter>& parameters) {
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

inline void on_one_thread(std::int64_t n, const cpu::Body& body) { body(0, n); }

// Each piece gets its own thread; pieces begin anywhere.
inline cpu::Parallel on_threads(Dice& dice, int threads) {
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

}  // namespace pycomm::test

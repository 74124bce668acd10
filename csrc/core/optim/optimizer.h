// What the optimizers share: settings, storage formats, and the factors of a step.
//
// The arithmetic of one element is fp32 without fused multiply-add, so that all processors give the
// same bits. Values that are the same for all elements are computed once, in double.
#pragma once

#include <cmath>

#include "core/types.h"

namespace pycomm {

enum class Rule : std::uint8_t;  // core/optim/table.h

// How the numbers of a parameter, gradient or state are stored.
enum class Storage : std::uint8_t {
  none,
  f32,
  f16,  // second moments as roots: core/optim/root_half.h
  bf16,
  remainder,  // the low 16 bits of weights in bf16: core/optim/split_float.h
  code8       // core/optim/state8.h
};

// Bytes per element.
PYCOMM_HD constexpr std::int64_t size_of(Storage storage) {
  switch (storage) {
    case Storage::none:
      return 0;
    case Storage::f32:
      return 4;
    case Storage::code8:
      return 1;
    default:
      return 2;
  }
}

inline constexpr int kMostStates = 3;

// The settings of a parameter group, named as in torch.optim.
struct Settings {
  Rule rule{};
  bool amsgrad = false;    // adamw
  bool decoupled = false;  // adamw: weight decay apart from the gradient
  bool nesterov = false;   // sgd
  bool maximize = false;
  bool adapt = false;       // lamb: scale the step by the weights' norm
  bool stochastic = false;  // round bf16 weights stochastically, as second moments always are
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;
  std::uint64_t seed = 0;
};

// base^n by repeated squaring: the same bits everywhere, which pow() does not promise.
PYCOMM_HD double power(double base, std::int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1, base *= base) result = (n & 1) != 0 ? result * base : result;
  return result;
}

// beta * old + (1 - beta) * value, computed as a step from the operand with the larger weight. This
// has one small rounding error instead of three large ones.
struct Average {
  float factor;
  // 1: the step starts from the new value; 0: from the old one. (A bool would not vectorise.)
  float from_new;

  PYCOMM_HD explicit Average(double beta)
      : factor(static_cast<float>(beta >= 0.5 ? 1.0 - beta : -beta)),
        from_new(beta >= 0.5 ? 0.0f : 1.0f) {}

  PYCOMM_HD float operator()(float old, float value) const {
    return (from_new != 0.0f ? value : old) + factor * (value - old);
  }
  // The same for all elements of a thread, which choose once.
  template <std::size_t n>
  PYCOMM_HD void operator()(float (&old)[n], const float (&value)[n]) const {
    if (from_new != 0.0f) {
      stay_a_branch();
      for (std::size_t i = 0; i < n; ++i) old[i] = value[i] + factor * (value[i] - old[i]);
      stay_a_branch();
    } else {
      for (std::size_t i = 0; i < n; ++i) old[i] = old[i] + factor * (value[i] - old[i]);
    }
  }
};

}  // namespace pycomm

// Lion: one element's update (Chen et al. 2023, "Symbolic discovery of optimization algorithms").
//
//   u = sign(beta1 * m + (1 - beta1) * g)
//   p = p * (1 - lr * weight_decay) - lr * u
//   m = beta2 * m + (1 - beta2) * g
//
// 20 bytes per element in fp32. If the argument of sign() is NaN, so is the result.
#pragma once

#include "core/optim/optimizer.h"

namespace pycomm {

struct Lion {
  static constexpr int kStates = 1;

  float lr, decay;
  Average direction, momentum;

  PYCOMM_HD Lion(const Settings& s, double)
      : lr(static_cast<float>(s.lr)),
        decay(static_cast<float>(1.0 - s.lr * s.weight_decay)),
        direction(s.beta1),
        momentum(s.beta2) {}

  PYCOMM_HD void operator()(float g, float& p, float& m, float&, float&) const {
    const float mixed = direction(m, g);
    const float sign = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;
    m = momentum(m, g);
    p = p * decay - lr * sign;
  }
};

}  // namespace pycomm

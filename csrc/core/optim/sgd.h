// Stochastic gradient descent: one element's update, as torch.optim.SGD defines it.
//
//   g += weight_decay * p
//   b = momentum * b + (1 - dampening) * g, in the first step b = g
//   p -= lr * b, or with Nesterov momentum p -= lr * (g + momentum * b)
//
// 20 bytes per element in fp32 with momentum, 12 without.
#pragma once

#include "core/optim/optimizer.h"

namespace pycomm {

template <bool buffered>
struct Sgd {
  static constexpr int kStates = buffered ? 1 : 0;

  float lr, weight_decay, momentum, keep;
  bool nesterov;

  PYCOMM_HD Sgd(const Settings& s, double step)
      : lr(static_cast<float>(s.lr)),
        weight_decay(static_cast<float>(s.weight_decay)),
        momentum(static_cast<float>(s.momentum)),
        keep(step > 1.0 ? static_cast<float>(1.0 - s.dampening) : 1.0f),  // b is zero at first
        nesterov(s.nesterov) {}

  PYCOMM_HD void operator()(float g, float& p, float& b, float&, float&) const {
    g = weight_decay != 0.0f ? g + weight_decay * p : g;
    float step = g;
    if constexpr (buffered) {
      b = momentum * b + keep * g;
      step = nesterov ? g + momentum * b : b;
    }
    p = p - lr * step;
  }
};

}  // namespace pycomm

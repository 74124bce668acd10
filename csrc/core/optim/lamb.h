// LAMB: one element's update (You et al. 2020, "Large batch optimization for deep learning").
//
//   m, v as in Adam (core/optim/adamw.h)
//   u = m^ / (sqrt(v^) + eps) + weight_decay * p
//   p -= lr * ratio * u,   ratio = |p| / |u| over the whole parameter, 1 if either is zero
//
// Two passes: the first one only reads, to compute the two norms; the second one updates. 16 + 28
// bytes per element in fp32.
#pragma once

#include "core/optim/adamw.h"

namespace pycomm {

struct Lamb {
  static constexpr int kStates = 2;

  Moments moments;
  float weight_decay, rate;

  PYCOMM_HD Lamb(const Settings& s, double step, double ratio = 1.0)
      : moments(s, step, 1.0),
        weight_decay(static_cast<float>(s.weight_decay)),
        rate(finite_rate(s.lr * ratio)) {}

  // Clamps the rate to fp32's range. Weights of 1e20 may be 1e40 times as large as their
  // directions, which is infinite in fp32.
  PYCOMM_HD static float finite_rate(double rate) {
    constexpr double most = 0x1.fffffep127;
    return static_cast<float>(rate > most ? most : rate);
  }

  // Returns u and updates the moments.
  PYCOMM_HD float direction(float g, float p, float& m, float& v) const {
    moments.move(g, m, v);
    return moments.direction(m, v) + weight_decay * p;
  }

  PYCOMM_HD void operator()(float g, float& p, float& m, float& v, float&) const {
    p = p - rate * direction(g, p, m, v);
  }
};

// The ratio, from the sums of squares of a parameter and of its u.
PYCOMM_HD double lamb_ratio(double weights, double directions) {
  return weights > 0.0 && directions > 0.0 ? std::sqrt(weights) / std::sqrt(directions) : 1.0;
}

}  // namespace pycomm

// Adam and AdamW: one element's update (Kingma, Ba 2015; Loshchilov, Hutter 2019; AMSGrad: Reddi,
// Kale, Kumar 2018).
//
//   g += weight_decay * p                             if the decay is coupled (Adam)
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g * g;  AMSGrad divides by the largest v so far
//   p = p * (1 - lr * weight_decay) - lr * m^ / (sqrt(v^) + eps),   m^ = m / (1 - beta1^t), ...
//
// The bias corrections of m and v become one factor of the step and one of eps.
// 28 bytes per element in fp32: p, m, v read and written, g read.
#pragma once

#include "core/optim/moderate.h"
#include "core/optim/optimizer.h"

namespace pycomm {

struct Moments {
  Average first, second;
  float factor;  // step size: multiplies m / (sqrt(v) + eps)
  float eps;

  PYCOMM_HD Moments(const Settings& s, double step, double scale)
      : first(s.beta1), second(s.beta2) {
    const auto t = static_cast<std::int64_t>(step);
    const double root = std::sqrt(1.0 - power(s.beta2, t));
    factor = static_cast<float>(scale * root / (1.0 - power(s.beta1, t)));
    eps = static_cast<float>(s.eps * root);
  }

  PYCOMM_HD void move(float g, float& m, float& v) const {
    m = first(m, g);
    v = second(v, g * g);
  }

  // The same for all elements of a thread.
  template <std::size_t n>
  PYCOMM_HD void move(const float (&g)[n], float (&m)[n], float (&v)[n]) const {
    first(m, g);
    float squares[n];
    for (std::size_t i = 0; i < n; ++i) squares[i] = g[i] * g[i];
    second(v, squares);
  }

  PYCOMM_HD float direction(float m, float v) const { return along(m, std::sqrt(v)); }

  // The same, from the root of v.
  PYCOMM_HD float along(float m, float root) const { return factor * (m / (root + eps)); }

  // The same, if all numbers are_moderate().
  PYCOMM_HD float moderately_along(float m, float root) const {
    return factor * moderate_quotient(m, root + eps);
  }
  PYCOMM_HD bool are_moderate(const Magnitudes& m, const Magnitudes& v) const {
    constexpr float most = kMostDivisor / 2;
    return m.are_between(kLeastDividend, kMostDividend) & v.are_between(kLeastRooted, most * most) &
           (eps <= most);
  }
};

template <bool amsgrad>
struct AdamW {
  static constexpr int kStates = amsgrad ? 3 : 2;
  static constexpr bool kInHalves = true;      // has move() and step()
  static constexpr int kRooted = kStates - 1;  // the state whose roots step() gives

  Moments moments;
  float decay;    // factor of p if the decay is decoupled, else 1
  float coupled;  // the decay if it is coupled, else 0

  PYCOMM_HD AdamW(const Settings& s, double step)
      : moments(s, step, s.lr),
        decay(s.decoupled ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0f),
        coupled(s.decoupled ? 0.0f : static_cast<float>(s.weight_decay)) {}

  PYCOMM_HD void operator()(float g, float& p, float& m, float& v, float& largest) const {
    g = coupled != 0.0f ? g + coupled * p : g;
    moments.move(g, m, v);
    if constexpr (amsgrad) largest = larger(largest, v);
    p = p * decay - moments.direction(m, amsgrad ? largest : v);
  }

  // The two halves of an update of all elements of a thread. Between them a GPU looks at the moments.
  template <std::size_t n>
  PYCOMM_HD void move(float (&g)[n], const float (&p)[n], float (&m)[n], float (&v)[n],
                      float (&largest)[n]) const {
    if (coupled != 0.0f) {
      for (std::size_t i = 0; i < n; ++i) g[i] = g[i] + coupled * p[i];
    }
    moments.move(g, m, v);
    if constexpr (amsgrad) {
      for (std::size_t i = 0; i < n; ++i) largest[i] = larger(largest[i], v[i]);
    }
  }
  // Also gives the roots of the moments that it divides by: v, or the largest.
  template <std::size_t n>
  PYCOMM_HD void step(float (&p)[n], const float (&m)[n], const float (&v)[n],
                      const float (&largest)[n], float (&root)[n]) const {
    const float (&divisors)[n] = amsgrad ? largest : v;
    if (moments.are_moderate(Magnitudes(m), Magnitudes::of_squares(divisors))) {
      for (std::size_t i = 0; i < n; ++i) {
        root[i] = moderate_root(divisors[i]);
        p[i] = p[i] * decay - moments.moderately_along(m[i], root[i]);
      }
    } else {
      for (std::size_t i = 0; i < n; ++i) {
        root[i] = std::sqrt(divisors[i]);
        p[i] = p[i] * decay - moments.along(m[i], root[i]);
      }
    }
  }

 private:
  PYCOMM_HD static float larger(float largest, float v) {
    return v > largest || v != v ? v : largest;
  }
};

}  // namespace pycomm

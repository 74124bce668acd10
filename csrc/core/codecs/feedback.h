// Error feedback, one element at a time. A residual holds what a rank has not sent yet, in fp32;
// what encoding loses goes back into it, so that nothing is lost.
// References: Seide et al. 2014, "1-bit SGD"; Lin et al. 2018, "Deep gradient compression", for the
// velocity.
#pragma once

#include <limits>

#include "core/types.h"

namespace pycomm {

// What a compressed operation needs beyond an Operation; ranks may differ in it.
struct Feedback {
  float* residual = nullptr;  // fp32, like the tensor
  float* velocity = nullptr;  // top-k with momentum: the same
  float momentum = 0;
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  // Where a tensor is zero on all ranks nothing is sent, and residual and velocity stay: so that a
  // result that nobody will use takes nothing along.
  bool hold_unused = false;
  const float* scale = nullptr;      // what the tensor has been multiplied by; or null
  float* residual_before = nullptr;  // take residual and velocity as they were; or null
  float* velocity_before = nullptr;
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Residual and velocity are kept in units of the unscaled tensor. A scale so small that its inverse
// is infinite becomes NaN, and so does every contribution: an overflow, which leaves them alone.
struct Scaling {
  float scale = 1;
  float inverse = 1;
};

PYCOMM_HD Scaling scaling_of(const Feedback& feedback) {
  if (feedback.scale == nullptr) return {};
  const float scale = *feedback.scale;
  const float inverse = 1.0f / scale;
  return {scale + (inverse - inverse), inverse};
}

// What a rank contributes.
PYCOMM_HD float contribution(float x, float residual, float scale) { return x + residual * scale; }

// A contribution beyond the largest_safe() counts as infinite: residuals are then left alone, so
// nobody may take the result, of which they are a part, for a good one.
PYCOMM_HD float limited(float contribution, float limit) {
  return contribution > limit ? kInfinity : contribution < -limit ? -kInfinity : contribution;
}

// Momentum correction: what takes the place of x, and is the next velocity (scaled).
PYCOMM_HD float accelerated(float velocity, float momentum, float x, float scale) {
  return momentum * (velocity * scale) + x;
}

// What is lost where `value` has become `sent`. `factor`: of a mean, the ranks it is of, because
// residuals are in units of the sum; times Scaling::inverse.
PYCOMM_HD float lost(float value, float sent, float factor) { return (value - sent) * factor; }

}  // namespace pycomm

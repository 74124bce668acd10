// Error feedback, one element at a time. A residual holds, in fp32, what a rank has not sent yet.
// The encoding error is added to it, so that nothing is lost for good.
// References: Seide et al. 2014, "1-bit SGD"; Lin et al. 2018, "Deep gradient compression", for the
// velocity.
#pragma once

#include <limits>

#include "core/types.h"

namespace pycomm {

// What a compressed operation needs in addition to an Operation. Ranks must agree on the parts that
// details_of() (core/call.h) returns, and may differ in the others.
struct Feedback {
  float* residual = nullptr;  // fp32, same length as the tensor
  float* velocity = nullptr;  // top-k with momentum: likewise
  float momentum = 0;
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  // If the tensor is zero on all ranks, send nothing and keep residual and velocity, so that a
  // result that nobody uses does not use them up.
  bool hold_unused = false;
  const float* scale = nullptr;      // the factor of a scaled tensor; or null
  float* residual_before = nullptr;  // receive copies of the old values; or null
  float* velocity_before = nullptr;
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The loss scale. Residual and velocity are in units of the unscaled tensor. If the scale is so
// small that its inverse is infinite, it becomes NaN here, and so does every contribution. That is
// an overflow, which leaves residual and velocity unchanged.
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

// A rank's contribution.
PYCOMM_HD float contribution(float x, float residual, float scale) { return x + residual * scale; }

// Contributions beyond largest_safe() become infinite. Residuals are left unchanged in that case,
// so the result, which includes them, must not pass for a valid one.
PYCOMM_HD float limited(float contribution, float limit) {
  return contribution > limit ? kInfinity : contribution < -limit ? -kInfinity : contribution;
}

// Momentum correction: replaces x by the new velocity (scaled).
PYCOMM_HD float accelerated(float velocity, float momentum, float x, float scale) {
  return momentum * (velocity * scale) + x;
}

// The error of sending `sent` instead of `value`, as a change of the residual. `factor` is
// Scaling::inverse; for a mean, times the number of ranks, because residuals are in units of the
// sum.
PYCOMM_HD float lost(float value, float sent, float factor) { return (value - sent) * factor; }

}  // namespace pycomm

// Error feedback, one element at a time. A residual holds what a rank has not sent yet, in fp32;
// what encoding loses goes back into it, so that nothing is lost.
// References: Seide et al. 2014, "1-bit SGD"; Lin et al. 2018, "Deep gradient compression", for the
// velocity.
#pragma once

#include "common.h"

namespace pycomm {

// What a compressed operation needs beyond an Operation; ranks may differ in it.
struct Feedback {
  float* residual = nullptr;  // fp32, like the tensor
  float* velocity = nullptr;  // top-k with momentum: the same
  float momentum = 0;
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
};

// What a rank contributes.
PYCOMM_HD float contribution(float x, float residual) { return x + residual; }

// Momentum correction: what takes the place of x, and is the next velocity.
PYCOMM_HD float accelerated(float velocity, float momentum, float x) {
  return momentum * velocity + x;
}

// What is lost where `value` has become `sent`; of a mean over `divisor` ranks, in units of the sum.
PYCOMM_HD float lost(float value, float sent, float divisor) { return (value - sent) * divisor; }

}  // namespace pycomm

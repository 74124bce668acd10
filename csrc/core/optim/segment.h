// What a step works on, CPU and CUDA alike: parameters with all that belongs to them, and what is
// only known while it runs.
#pragma once

#include <cmath>

#include "core/optim/optimizer.h"
#include "core/reduce.h"

namespace pycomm {

// One parameter with all that belongs to it. Python fills it as 64-bit words: optim/_storage.py.
struct Segment {
  void* param;
  const void* grad;
  void* master;  // fp32 weights, or the remainder
  void* state[kMostStates];
  float* largest[kMostStates];  // of states in 8 bits, per block
  float* step;                  // steps done
  std::int64_t count;
  std::uint64_t stream;  // tells the random bits of parameters apart
  Storage param_storage, grad_storage, master_storage, state_storage[kMostStates];
  std::uint8_t unused[2];
};
static_assert(sizeof(Segment) == 13 * 8);

// What steps read from memory, because a device writes it there; each may be null.
struct StepControl {
  const float* grad_scale;  // what gradients have been multiplied by
  float* found_inf;         // not zero: the step does nothing
  float* clip;              // factor of unscaled gradients
};

PYCOMM_HD bool skips(const StepControl& control) {
  return control.found_inf != nullptr && *control.found_inf != 0.0f;
}

// What gradients are multiplied by.
PYCOMM_HD float gradient_factor(bool maximize, const StepControl& control) {
  const double scale = control.grad_scale == nullptr ? 1.0 : *control.grad_scale;
  const double clip = control.clip == nullptr ? 1.0 : *control.clip;
  return static_cast<float>((maximize ? -clip : clip) / scale);
}

// The norm of the unscaled gradients, from the sum of their squares. Notes in found_inf that it is
// not finite, and in clip what brings it down to `max_norm`.
PYCOMM_HD double conclude(double squares, double max_norm, const StepControl& control) {
  const double scale = control.grad_scale == nullptr ? 1.0 : *control.grad_scale;
  const double norm = std::sqrt(squares) / scale;
  const double factor = max_norm / (norm + 1e-6);
  if (control.found_inf != nullptr && norm - norm != 0.0) *control.found_inf = 1.0f;
  if (control.clip != nullptr)
    *control.clip = static_cast<float>(store<double>(factor > 1.0 ? 1.0 : factor));
  return store<double>(norm);
}

}  // namespace pycomm

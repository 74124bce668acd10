// The data of an optimizer step, on CPU and CUDA alike: parameters with their gradients and states,
// and values that are known only while the step runs.
#pragma once

#include <cmath>

#include "core/optim/optimizer.h"
#include "core/reduce.h"

namespace pycomm {

// One parameter, or a part of one, with its gradient and states. Python fills it in as 64-bit words:
// pycomm/optim/_storage.py.
struct Segment {
  void* param;
  const void* grad;
  void* master;  // fp32 weights or remainders
  void* state[kMostStates];
  float* largest[kMostStates];  // scales of 8-bit states, one per block
  float* step;                  // number of steps done
  std::int64_t count;
  std::int64_t first;    // of a part: its place in the parameter, a multiple of kSumBlock
  std::uint64_t stream;  // gives each parameter its own random bits
  Storage param_storage, grad_storage, master_storage, state_storage[kMostStates];
  std::uint8_t unused[2];
};
static_assert(sizeof(Segment) == 14 * 8);

// Values that a step reads from memory, because a device writes them there. Each may be null.
struct StepControl {
  const float* grad_scale;  // the factor of scaled gradients
  float* found_inf;         // if not zero, the step does nothing
  float* clip;              // factor that clips unscaled gradients
};

PYCOMM_HD bool skips(const StepControl& control) {
  return control.found_inf != nullptr && *control.found_inf != 0.0f;
}

// The factor that a step multiplies gradients by.
PYCOMM_HD float gradient_factor(bool maximize, const StepControl& control) {
  const double scale = control.grad_scale == nullptr ? 1.0 : *control.grad_scale;
  const double clip = control.clip == nullptr ? 1.0 : *control.clip;
  return static_cast<float>((maximize ? -clip : clip) / scale);
}

// Returns the norm of the unscaled gradients, given the sum of squares of the scaled ones. Sets
// found_inf if the norm is not finite, and clip to the factor that reduces the norm to `max_norm`.
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

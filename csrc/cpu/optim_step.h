// An optimizer's step over a list of parameters, and the norm of their gradients, on any number of
// threads. Every result is a function of the numbers alone: threads share out whole chunks, sums
// have one order, and random bits are those of the parameter and the element.
#pragma once

#include <functional>
#include <vector>

#include "core/optimizer.h"

namespace pycomm::cpu {

// One parameter with all that belongs to it. Python fills it as 64-bit words: optim/_table.py.
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
struct Control {
  const float* grad_scale;  // what gradients have been multiplied by
  float* found_inf;         // not zero: the step does nothing
  float* clip;              // factor of unscaled gradients
};

// Runs body(begin, end) over pieces of 0 .. n, on as many threads as it likes.
using Body = std::function<void(std::int64_t begin, std::int64_t end)>;
using Parallel = std::function<void(std::int64_t n, const Body& body)>;

// The norm of the unscaled gradients, exact to double's rounding. Sets found_inf where a gradient is
// not finite, and clip to what brings the norm down to `max_norm`.
double survey(const std::vector<Segment>& segments, const Control& control, double max_norm,
              const Parallel& parallel);

void step(const Settings& settings, const std::vector<Segment>& segments, const Control& control,
          const Parallel& parallel);

}  // namespace pycomm::cpu

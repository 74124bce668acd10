// An optimizer's step over a list of parameters, and the norm of their gradients, on any number of
// threads. Every result is a function of the numbers alone: threads share out whole chunks, sums
// have one order, and random bits are those of the parameter and the element.
#pragma once

#include <functional>
#include <vector>

#include "core/optim/segment.h"

namespace pycomm::cpu {

// Runs body(begin, end) over pieces of 0 .. n, on as many threads as it likes.
using Body = std::function<void(std::int64_t begin, std::int64_t end)>;
using Parallel = std::function<void(std::int64_t n, const Body& body)>;

// The norm of the unscaled gradients, exact to double's rounding. Sets found_inf where a gradient is
// not finite, and clip to what brings the norm down to `max_norm`.
double grad_norm(const std::vector<Segment>& segments, const StepControl& control, double max_norm,
                 const Parallel& parallel);

void step(const Settings& settings, const std::vector<Segment>& segments,
          const StepControl& control, const Parallel& parallel);

}  // namespace pycomm::cpu

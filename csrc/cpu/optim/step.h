// An optimizer step over a list of parameters, and the norm of their gradients, on any number of
// threads. Results depend only on the numbers, not on the threads: threads work on whole chunks,
// sums have a fixed order, and random bits are determined by parameter and element.
#pragma once

#include <functional>
#include <vector>

#include "core/optim/segment.h"
#include "cpu/optim/loops.h"

namespace pycomm::cpu {

// Runs body(begin, end) over pieces of 0 .. n, on any number of threads.
using Body = std::function<void(std::int64_t begin, std::int64_t end)>;
using Parallel = std::function<void(std::int64_t n, const Body& body)>;

// The norm of the unscaled gradients, exact up to rounding in double. Sets found_inf if a gradient
// is not finite, and clip to the factor that reduces the norm to `max_norm`.
double grad_norm(const std::vector<Segment>& segments, const StepControl& control, double max_norm,
                 const Parallel& parallel);

// LAMB's sums of squares of each segment's weights and directions, from which its ratio follows
// (core/optim/lamb.h). Zeros if the step is skipped.
std::vector<LambSums> lamb_sums(const Settings& settings, const std::vector<Segment>& segments,
                                const StepControl& control, const Parallel& parallel);

void step(const Settings& settings, const std::vector<Segment>& segments,
          const StepControl& control, const Parallel& parallel);

}  // namespace pycomm::cpu

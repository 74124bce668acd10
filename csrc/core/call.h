// An operation together with its buffers, as a caller passes it to an executor.
#pragma once

#include "core/codecs/feedback.h"
#include "core/details.h"
#include "core/operation.h"

namespace pycomm {

struct Call {
  Operation operation;
  const void* input = nullptr;
  void* output = nullptr;
  Feedback feedback = {};
  Details details = {};  // only shape and label; details_of() adds the rest from `feedback`
};

// The parts of a compressed call that change its result, so that ranks must agree on them. Not
// included: the scale, which lies in the executor's memory, and Feedback::hold_unused, which goes
// with the operation's tag.
inline Details details_of(const Call& call) {
  Details details = call.details;
  const Feedback& feedback = call.feedback;
  if (call.operation.codec.stochastic != 0) {
    details.seed = feedback.seed;
    details.step = feedback.step;
  }
  if (feedback.velocity != nullptr) details.momentum = feedback.momentum;
  return details;
}

}  // namespace pycomm

// An operation with its buffers, as a caller hands it to an executor.
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
  Details details = {};  // shape and label; the rest is in `feedback`
};

// What ranks must agree on of a compressed call, as far as it changes the result. The scale lies in
// the executor's memory; Feedback::hold_unused goes with the operation's tag.
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

// An operation with its buffers, as a caller hands it to an executor.
#pragma once

#include "core/feedback.h"
#include "core/operation.h"

namespace pycomm {

struct Call {
  Operation operation;
  const void* input = nullptr;
  void* output = nullptr;
  Feedback feedback = {};
};

}  // namespace pycomm

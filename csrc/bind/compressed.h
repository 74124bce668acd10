// A compressed all-reduce as Python hands it over, to the CPU's group or to CUDA's.
#pragma once

#include "core/feedback.h"
#include "core/operation.h"

namespace pycomm::bind {

struct CompressedCall {
  Operation operation;
  Feedback feedback;
  const void* input;
  void* output;
};

}  // namespace pycomm::bind

// The body of an operation that brings its own executor.
#pragma once

#include "cpu/executor/comm.h"

namespace pycomm::cpu {

class CustomOperation {
 public:
  // What the rank announces.
  virtual Preflight preflight() const { return {}; }
  // Runs the operation, which `comm` has begun.
  virtual void run(Comm& comm) = 0;
  // Called after a failure, when no rank uses the call's memory any more.
  virtual void note_failure(const Comm&) {}

 protected:
  ~CustomOperation() = default;
};

}  // namespace pycomm::cpu

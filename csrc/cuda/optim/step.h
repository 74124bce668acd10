// Optimizer steps on a device: the bits of cpu/optim/step.h. Host code; no torch. Everything is
// enqueued on the job's stream, nothing waits, nothing allocates.
//
// A step is one launch for a whole group of parameters; LAMB takes one before, for its ratios. A
// grad_norm() is one launch. What changes between steps lies in device memory and is read there, so that
// a captured graph replays rightly.
#pragma once

#include <vector>

#include "core/optim/segment.h"

namespace pycomm::cuda {

// Segments in device memory. The host remembers what it has written there and writes only what has
// changed, through parameters of kernels: no buffer has to outlive the call, also while a graph is
// being captured.
class SegmentTable {
 public:
  // Takes new segments; returns the bytes of device memory, aligned to 16, that they need.
  std::int64_t set(const std::vector<Segment>& segments);
  // Makes `memory` hold them. Memory other than the last call's is taken to hold nothing.
  void upload(void* memory, int device, std::uintptr_t stream);

  void* memory() const { return memory_; }
  std::int64_t segments() const { return segments_; }
  // What blocks take at a time: of all segments, and of some.
  std::int64_t tiles() const { return first_tiles_.back(); }
  std::int64_t tiles(std::int64_t first, std::int64_t count) const {
    return first_tiles_[first + count] - first_tiles_[first];
  }

 private:
  void* memory_ = nullptr;
  std::int64_t segments_ = 0;
  std::vector<std::int64_t> first_tiles_{0};
  std::vector<std::uint64_t> wanted_, written_;
};

struct StepJob {
  int device = 0;
  std::uintptr_t stream = 0;
  const SegmentTable* table = nullptr;
  StepControl control = {};
};

// As cpu::grad_norm(), over the whole table. `norm` gets what that returns; found_inf is overwritten if
// `sets_found`, otherwise only ever set.
struct GradNormPass {
  double max_norm = 0;
  bool sets_found = false;
  double* norm = nullptr;
};
void grad_norm(const StepJob& job, const GradNormPass& pass);

// A step of the segments [first, first + count). `lr`, unless null, replaces the settings': a device's
// float, or double.
struct ParamRange {
  std::int64_t first = 0, count = 0;
  Settings settings = {};
  const void* lr = nullptr;
  bool lr_is_double = false;
};
void step(const StepJob& job, const ParamRange& params);

}  // namespace pycomm::cuda

// Optimizer steps on a device, with the same bits as cpu/optim/step.h. Host code; no torch. All work is
// enqueued on the job's stream; nothing waits or allocates.
//
// A step is one launch for a whole group of parameters; LAMB needs another one before it, for its
// ratios. grad_norm() is one launch. Values that change between steps lie in device memory, so that a
// captured graph replays correctly.
#pragma once

#include <vector>

#include "core/optim/segment.h"
#include "cuda/device_words.h"

namespace pycomm::cuda {

// Segments in device memory.
class SegmentTable {
 public:
  // Takes new segments; returns the bytes of device memory, aligned to 16, that they need.
  std::int64_t set(const std::vector<Segment>& segments);
  // Writes the segments to `memory`.
  void upload(void* memory, int device, std::uintptr_t stream) {
    words_.upload(memory, device, stream);
  }

  void* memory() const { return words_.memory(); }
  std::int64_t segments() const { return segments_; }
  // Tiles: of all segments, and of a range of them.
  std::int64_t tiles() const { return first_tiles_.back(); }
  std::int64_t tiles(std::int64_t first, std::int64_t count) const {
    return first_tiles_[first + count] - first_tiles_[first];
  }

 private:
  DeviceWords words_;
  std::int64_t segments_ = 0;
  std::vector<std::int64_t> first_tiles_{0};
};

struct StepJob {
  int device = 0;
  std::uintptr_t stream = 0;
  const SegmentTable* table = nullptr;
  StepControl control = {};
};

// Like cpu::grad_norm(), over the whole table. Writes the norm to `norm`. With `sets_found`, found_inf
// is overwritten; otherwise it is only ever set.
struct GradNormPass {
  double max_norm = 0;
  bool sets_found = false;
  double* norm = nullptr;
};
void grad_norm(const StepJob& job, const GradNormPass& pass);

// A step of the segments [first, first + count). If `lr` is not null, it points to a float or double in
// device memory that replaces the settings' learning rate.
struct ParamRange {
  std::int64_t first = 0, count = 0;
  Settings settings = {};
  const void* lr = nullptr;
  bool lr_is_double = false;
};
void step(const StepJob& job, const ParamRange& params);

}  // namespace pycomm::cuda

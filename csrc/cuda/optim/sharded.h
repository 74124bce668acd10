// Sharded optimizer steps on a device, with the same bits as cpu/optim/sharded_step.h. Host code; no
// torch.
//
// Each is one launch, like a collective. What it reads lies in a table in device memory.
#pragma once

#include <string>
#include <vector>

#include "core/call.h"
#include "core/optim/shard.h"
#include "cuda/device_words.h"
#include "cuda/layout.h"

namespace pycomm::cuda {

struct ShardGroup {
  Settings settings;
  std::size_t end;  // after the group's last shard
  // Not null: a float or double in device memory that replaces the settings' learning rate.
  const void* lr = nullptr;
  bool lr_is_double = false;
};

// What one rank passes to a sharded step. Pointers are to device memory.
struct ShardedStep {
  std::vector<ShardGroup> groups;  // of one rule
  std::vector<Shard> shards;
  std::byte* arena = nullptr;  // in the window; has the same layout on every rank
  std::int64_t arena_bytes = 0;
  double* sums = nullptr;  // in the arena: kShardSums per 1,024 elements of all shards
  StepControl control = {};
  double max_norm = 0.0;
  bool measures = false;   // the norm is needed, or a search for infinities
  double* norm = nullptr;  // for the norm, if it is measured
};

class ShardTable {
 public:
  // Takes a new step; returns the bytes of device memory, aligned to 16, that it needs.
  std::int64_t set(const ShardedStep& step);
  void upload(void* memory, int device, std::uintptr_t stream) {
    words_.upload(memory, device, stream);
  }
  // For the launch, on the upload's stream.
  Sharding sharding() const { return {static_cast<const std::uint64_t*>(words_.memory()), rule_}; }

 private:
  DeviceWords words_;
  Rule rule_{};
};

// The call that runs it. All ranks must pass the same `label`, which names everything else that
// must agree.
Call step_call(const ShardedStep& step, const std::string& label);

}  // namespace pycomm::cuda

// The CPU executor of the sharded average (core/algorithms/sharded_average.h).
#pragma once

#include <vector>

#include "core/algorithms/sharded_average.h"
#include "cpu/comm.h"

namespace pycomm::cpu {

// This rank's elements of one parameter's gradient. Python fills it in as 64-bit words:
// pycomm/_training/gradient_ring.py.
struct OwnGradient {
  const std::byte* from;  // in the bucket, which lies in the arena
  std::byte* to;
  std::int64_t count;
  std::int64_t adds;   // not 0: `to` holds an average, to which each rank's gradient is added
  std::int64_t dtype;  // a DType
};
static_assert(sizeof(OwnGradient) == 5 * 8);

struct ShardedAverage {
  std::vector<OwnGradient> gradients;
  std::byte* arena;  // in the heap; has the same layout on every rank
  std::int64_t arena_bytes;
};

// The call that runs it. All ranks must pass the same `label`, which names what else must agree.
Call average_call(ShardedAverage& average, const std::string& label);

class ShardedAverageComm {
 public:
  ShardedAverageComm(Comm& comm, const ShardedAverage& average) : comm_(comm), average_(average) {}

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  void announce();
  void signal(int channel) { comm_.signal(channel); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }
  void average();

 private:
  Comm& comm_;
  const ShardedAverage& average_;
};

static_assert(AverageExecutor<ShardedAverageComm>);

}  // namespace pycomm::cpu

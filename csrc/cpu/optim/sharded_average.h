// The CPU executor of the sharded average (core/algorithms/sharded_average.h).
#pragma once

#include <vector>

#include "core/algorithms/sharded_average.h"
#include "core/optim/shard.h"
#include "cpu/own_body.h"

namespace pycomm::cpu {

struct ShardedAverage final : OwnBody {
  void run(Comm& comm) override;

  std::vector<OwnGradient> gradients;
  std::byte* arena = nullptr;  // in the heap; has the same layout on every rank
  std::int64_t arena_bytes = 0;
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

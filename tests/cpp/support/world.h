// A group of ranks that are threads.
#pragma once

#include <memory>
#include <vector>

#include "cpu/group/local_world.h"
#include "support/run_all.h"

namespace pycomm::test {

// Ranks that are threads, without processes to watch.
inline std::shared_ptr<const cpu::Liveness> threads(int size) {
  const auto count = static_cast<std::size_t>(size);
  return std::make_shared<const cpu::Liveness>(std::vector<int>(count),
                                               std::vector<std::shared_ptr<cpu::Process>>(count));
}

inline Operation all_reduce_of(std::int64_t count) {
  Operation operation{};
  operation.collective = Collective::all_reduce;
  operation.dtype = DType::f32;
  operation.op = ReduceOp::sum;
  operation.count = count;
  return operation;
}

// A LocalWorld with little staging, so that tiles, slots and pieces wrap around, and a short timeout.
class World : public cpu::LocalWorld {
 public:
  explicit World(int ranks, std::int64_t staging_bytes = 64 << 10, std::uint32_t first_epoch = 0,
                 double timeout = 60)
      : LocalWorld(ranks, {staging_bytes, timeout, first_epoch}) {}
  explicit World(const std::vector<int>& ranks_per_node, std::int64_t staging_bytes = 64 << 10)
      : LocalWorld(ranks_per_node, {staging_bytes, 60, 0}) {}
};

}  // namespace pycomm::test

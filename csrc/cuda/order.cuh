// Launches of all operations, in one order per set of flags. Host code.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "core/algorithms/run.h"
#include "core/optim/table.h"
#include "cuda/codecs/bucket.cuh"
#include "cuda/launch.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

// A launch of any operation, before it is known what the kernel needs.
struct AnyLaunch : Launch {
  Bucket buckets[kMaxLocalRanks];
  Sharding shardings[kMaxLocalRanks];
  std::optional<std::uint64_t> captures[kMaxLocalRanks];
};

// A group of one compresses as well, so that it gives the errors and residuals of a larger group.
inline void launch_compressed(const AnyLaunch& any, cudaStream_t stream) {
  const CodedLaunch launch = prepare(any, any.buckets, stream);
  const Operation& operation = any.ranks[0].operation;
  if (operation.codec.kind == CodecKind::topk) return launch_topk_exchange(launch, stream);
  const std::vector<Part>& parts = any.buckets[0].parts;
  const auto feeds = [](const Part& part) { return part.feedback.residual != nullptr; };
  if (std::any_of(parts.begin(), parts.end(), feeds)) launch_preflight(launch, stream);
  Algorithms::visit(operation.algorithm, launch.layout.ranks, [&](auto row) {
    if constexpr (row.kCoded) launch_coded<decltype(row)>(launch, stream);
  });
}

inline void launch_sharded(const AnyLaunch& launch, cudaStream_t stream) {
  ShardedLaunch sharded{launch, {}};
  for (int i = 0; i < launch.local_ranks; ++i) sharded.tables[i] = launch.shardings[i].table;
  Rules::visit_row(launch.shardings[0].rule,
                   [&](auto row) { launch_sharded_step<decltype(row)>(sharded, stream); });
}

inline void launch_any(const AnyLaunch& launch, cudaStream_t stream) {
  const Operation& operation = launch.ranks[0].operation;
  if (stays_in_node(operation.collective)) return launch_sharded(launch, stream);
  if (operation.codec.kind != CodecKind::none) return launch_compressed(launch, stream);
  visit_body(operation, launch.layout.ranks,
             [&](auto body) { launch_plain<decltype(body)>(launch, stream); });
}

// Work that follows the latest of some launches can wait for it.
struct Latest {
  Event done;
  cudaStream_t stream = nullptr;
  bool launched = false;
  std::uint64_t capture = 0;
};

// Orders all launches that use one set of flags, on whatever streams they are. Launches in one
// capture are ordered among each other; the caller orders a graph with everything outside of it.
class Order {
 public:
  // Returns false if the device has failed and will run nothing more.
  bool can_run() const {
    const cudaError_t error = cudaEventQuery(live_.done);
    return error == cudaSuccess || error == cudaErrorNotReady;
  }

  // The stream is that of the launch's first rank.
  void launch(const AnyLaunch& launch, cudaStream_t stream) {
    Latest& latest = latest_in(launch.captures[0]);
    if (latest.launched && stream != latest.stream) {
      PYCOMM_CUDA_CHECK(cudaStreamWaitEvent(stream, latest.done, 0));
    }
    launch_any(launch, stream);
    PYCOMM_CUDA_CHECK(cudaEventRecord(latest.done, stream));
    latest.stream = stream;
    latest.launched = true;
  }

 private:
  // As many captures can be in progress at the same time. Nothing says that one has ended.
  static constexpr std::size_t kCaptures = 16;

  // An event that is recorded in a capture is meaningless outside of it, and vice versa.
  Latest& latest_in(std::optional<std::uint64_t> capture) {
    if (!capture) return live_;
    for (Latest& latest : captured_) {
      if (latest.capture == *capture) return latest;
    }
    if (captured_.size() == kCaptures) captured_.pop_front();
    Latest& latest = captured_.emplace_back();
    latest.capture = *capture;
    return latest;
  }

  Latest live_;
  std::deque<Latest> captured_;
};

}  // namespace pycomm::cuda

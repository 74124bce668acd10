// The launchers and their arguments. Each body of core/algorithms/run.h is compiled in its own file.
#pragma once

#include <cuda_runtime_api.h>

#include "core/codecs/table.h"
#include "core/operation.h"
#include "cuda/layout.h"

namespace pycomm {
struct Multicast;  // core/algorithms/table.h
}

namespace pycomm::cuda {

// What a rank's device knows of a region (cuda/endpoint.h): a device array of pointers. First every
// rank's memory, as this device sees it; then this rank's memory, as every rank's device sees it; then
// where this device reaches all ranks' memory at once, or null.
using RegionTable = std::byte* const*;

// One rank's part of a launch.
struct RankLaunch {
  Operation operation;
  std::byte* input;
  std::byte* output;
  RegionTable input_region;  // null if other ranks do not reach the tensor
  RegionTable output_region;
  std::byte* window;  // this rank's
  RegionTable windows;
  Mailbox* mailbox;
  std::int16_t rank;
  bool captured;         // the launch is part of a graph
  std::uint32_t number;  // of the launch on this rank, which records know
  std::uint64_t bytes;   // of the whole operation, which statistics tell
};

struct Launch {
  WindowLayout layout;
  std::uint64_t timeout_ns;
  int lanes;        // that work: the first ones of the layout
  int local_ranks;  // blocks [i * lanes, (i + 1) * lanes) belong to ranks[i]
  RankLaunch ranks[kMaxLocalRanks];
};

// A sharded step, with every rank's table.
struct ShardedLaunch : Launch {
  const std::uint64_t* tables[kMaxLocalRanks];
};

struct CodedLaunch;  // cuda/codecs/bucket.cuh

template <class Body>
void launch_plain(const Launch& launch, cudaStream_t stream);
template <>  // of fewer types, on another executor: cuda/multicast.cuh
void launch_plain<Multicast>(const Launch& launch, cudaStream_t stream);
// With a block codec.
template <class Body, class Codecs = BlockCodecs>
void launch_coded(const CodedLaunch& launch, cudaStream_t stream);
void launch_topk_exchange(const CodedLaunch& launch, cudaStream_t stream);
// `Rule` is a row of core/optim/table.h.
template <class Rule>
void launch_sharded_step(const ShardedLaunch& launch, cudaStream_t stream);

}  // namespace pycomm::cuda

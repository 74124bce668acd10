// A bucket's parts on a device: one table per rank, and how blocks divide the parts among them.
//
//   | a row per part | what must be zero, of every part | scratch of every part |
//
// All kernels of an operation read the table.
#pragma once

#include "core/algorithms/coded.h"
#include "cuda/codecs/bucket.h"
#include "cuda/launch.h"

namespace pycomm::cuda {

struct PartRow : RankLaunch {
  Feedback feedback;
  std::uint32_t* nonfinite;  // Bucket::nonfinite
  std::byte* zeroed;         // zero at the start
  std::byte* scratch;
  std::int64_t first_block;  // of the part's blocks, in kernels that do not meet other ranks
  std::int64_t blocks;
  std::int64_t lists;  // top-k: where its lists begin in a rank's staging
};

// The layout of a lane's staging area, and where it begins in every window: WindowLayout divides to find
// that.
struct LaneStaging : CodedStaging {
  std::int64_t first, parity, lane;

  LaneStaging() = default;
  LaneStaging(const WindowLayout& layout, const Codec& codec)
      : CodedStaging(in(layout.slot_bytes() * kStagingSlots, codec)),
        first(layout.staging(0, 0, 0)),
        parity(layout.staging(1, 0, 0) - first),
        lane(layout.staging(0, 1, 0) - first) {}

  PYCOMM_HD constexpr std::int64_t begin(std::uint32_t sequence, int of_lane) const {
    return first + (sequence & 1u) * parity + of_lane * lane;
  }
};

struct CodedLaunch : Launch {
  PartRow* rows[kMaxLocalRanks];  // device memory
  int parts;
  int blocks;           // of a rank, in kernels that do not meet other ranks
  LaneStaging staging;  // here it costs a kernel no registers
};

// Which work a block has: every `stride`-th piece of a part, from `first` on.
struct Share {
  int rank;  // of those in the launch
  int part;
  int first;
  int stride;
};

// For kernels with a block per rank and part.
__device__ inline Share whole_part(const CodedLaunch& launch) {
  const int block = static_cast<int>(blockIdx.x);
  return {block / launch.parts, block % launch.parts, 0, 1};
}

// For kernels with CodedLaunch::blocks per rank.
__device__ inline Share share_of_block(const CodedLaunch& launch) {
  const int rank = static_cast<int>(blockIdx.x) / launch.blocks;
  const int block = static_cast<int>(blockIdx.x) % launch.blocks;
  const PartRow* const rows = launch.rows[rank];
  int part = 0;
  for (int end = launch.parts; end - part > 1;) {
    const int middle = (part + end) / 2;
    (rows[middle].first_block <= block ? part : end) = middle;
  }
  return {rank, part, block - static_cast<int>(rows[part].first_block),
          static_cast<int>(rows[part].blocks)};
}

// For kernels with a block per rank and lane, which take all parts in turn. Small parts begin at
// different lanes.
__device__ inline Share share_of_lane(const CodedLaunch& launch, int part) {
  const int lanes = launch.lanes, block = static_cast<int>(blockIdx.x);
  return {block / lanes, part, (block + part) % lanes, lanes};
}

// A copy of a part's row in shared memory, for all threads of the block; valid until the next call.
__device__ inline const PartRow& fetch(const CodedLaunch& launch, int rank, int part) {
  constexpr int kWords = sizeof(PartRow) / 8;
  static_assert(sizeof(PartRow) % 8 == 0);
  __shared__ std::uint64_t words[kWords];
  const auto* const from = reinterpret_cast<const std::uint64_t*>(&launch.rows[rank][part]);
  __syncthreads();
  for (int i = threadIdx.x; i < kWords; i += blockDim.x) words[i] = from[i];
  __syncthreads();
  return *reinterpret_cast<const PartRow*>(words);
}

// Makes the ranks' tables, and keeps copies of residuals and velocities for ranks that want them.
CodedLaunch prepare(const Launch& launch, const Bucket* buckets, cudaStream_t stream);
// Finds what ranks tell of their tensors when they announce a block codec with feedback.
void launch_preflight(const CodedLaunch& launch, cudaStream_t stream);

}  // namespace pycomm::cuda

// What the CUDA executors of the sharded step and average share. Each warp takes chunks of its own, in
// runs of 256 elements as in cuda/optim/step.cuh.
#pragma once

#include "core/optim/shard.h"
#include "cuda/comm.cuh"
#include "cuda/launch.cuh"
#include "cuda/optim/numbers.cuh"
#include "cuda/optim/shard_table.h"

namespace pycomm::cuda {

// Threads of a block: few enough that they get the registers that updates need.
inline constexpr int kShardThreads = 256;

class ShardedComm {
 public:
  __device__ explicit ShardedComm(const ShardedLaunch& launch)
      : comm_(launch), lanes_(launch.lanes) {}

  __device__ int rank() const { return comm_.rank(); }
  __device__ int size() const { return comm_.size(); }
  __device__ void announce() {
    comm_.announce();
    for (int r = threadIdx.x; r < size() && !comm_.failed(); r += blockDim.x) {
      arenas()[r] = comm_.input(r).data - comm_.begin();
    }
    __syncthreads();
  }
  __device__ void signal(int channel) { comm_.signal(channel); }
  __device__ void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

 protected:
  // Every rank's arena; valid after announce().
  __device__ static std::byte** arenas() {
    __shared__ std::byte* all[kMaxRanks];
    return all;
  }
  // The address in rank r's arena that corresponds to one in this rank's.
  template <class T>
  __device__ T* there(int r, T* here) const {
    return reinterpret_cast<T*>(arenas()[r] + (reinterpret_cast<std::uintptr_t>(here) -
                                               reinterpret_cast<std::uintptr_t>(arenas()[rank()])));
  }

  // This warp's number among the warps of the rank.
  __device__ std::int64_t warp() const {
    return static_cast<std::int64_t>(blockIdx.x) % lanes_ * kWarps + threadIdx.x / 32;
  }
  __device__ std::int64_t warps() const { return std::int64_t{lanes_} * kWarps; }

  // Calls visit(row, first, last) for this warp's chunks of each row.
  template <class Row, class Visit>
  __device__ void for_chunks(const Row* rows, std::int64_t count, const Visit& visit) const {
    const Range mine = part_of(rows[count].first_chunk, warps(), warp(), 1);
    const std::int64_t end = mine.begin + mine.count;
    for (std::int64_t at = mine.begin; at < end;) {
      const std::int64_t row = row_at(rows, count, &Row::first_chunk, at);
      const std::int64_t first = rows[row].first_chunk, next = rows[row + 1].first_chunk;
      const std::int64_t stop = next < end ? next : end;
      visit(row, at - first, stop - first);
      at = stop;
    }
  }

  // Calls visit(at, left) for the runs of chunks [first, last) of `count` elements.
  template <class Visit>
  __device__ static void for_runs(std::int64_t first, std::int64_t last, std::int64_t count,
                                  const Visit& visit) {
    const std::int64_t end = last * kSumBlock < count ? last * kSumBlock : count;
    for (std::int64_t at = first * kSumBlock; at < end; at += kRun) {
      visit(at, static_cast<int>(end - at < kRun ? end - at : kRun));
    }
  }

  static constexpr int kWarps = kShardThreads / 32;

  BlockComm<std::byte> comm_;
  const int lanes_;
};

}  // namespace pycomm::cuda

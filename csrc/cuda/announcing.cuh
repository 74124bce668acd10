// What ranks announce before an operation, lane by lane: each rank writes into the windows of all.
#pragma once

#include "cuda/failing.cuh"

namespace pycomm::cuda {

// The announcements of one operation and lane.
struct Announcements {
  const RankLaunch& me;
  const WindowLayout& layout;
  int lane;
  std::uint32_t sequence;

  __device__ Announcement& at(int to, int from) const {
    std::byte* const window = to == me.rank ? me.window : me.windows[to];
    return *reinterpret_cast<Announcement*>(window + layout.announcement(lane, sequence, from));
  }
  __device__ auto epoch(int to, int from) const {
    return shared_word<std::uint32_t>(&at(to, from).epoch);
  }
  __device__ bool has_come(int from) const {
    return epoch(me.rank, from).load(::cuda::std::memory_order_acquire) == sequence;
  }
};

// The first rank whose operation is not rank 0's, or -1. Not inlined, like all code for failures,
// so that other code holds no registers for it.
__device__ __noinline__ inline int differing_rank(Announcements all) {
  for (int r = 1; r < all.layout.ranks && all.has_come(0); ++r) {
    const Announcement &first = all.at(all.me.rank, 0), &other = all.at(all.me.rank, r);
    if (all.has_come(r) && !(first.operation == other.operation)) return r;
  }
  return -1;
}

// One thread reports a mismatch, if there is one.
__device__ __noinline__ inline void report_mismatch(Announcements all) {
  const int r = differing_rank(all);
  if (r < 0) return;
  report(all.me, Reason::mismatch, r, all.at(all.me.rank, 0).operation,
         all.at(all.me.rank, r).operation);
}

// All threads of a block that drains take the announcement back: a rank that comes later must not
// use tensors that this rank may have freed. After a mismatch it stays, because every rank must see
// it.
__device__ __noinline__ inline void withdraw(Announcements all) {
  if (differing_rank(all) >= 0) return;
  for (int r = threadIdx.x; r < all.layout.ranks; r += blockDim.x) {
    all.epoch(r, all.me.rank).store(all.sequence - 1, ::cuda::std::memory_order_relaxed);
  }
}

}  // namespace pycomm::cuda

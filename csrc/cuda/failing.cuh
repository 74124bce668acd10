// How a kernel reports a failure and hears of an abort: words that it shares with the host, and a clock.
#pragma once

#include <chrono>
#include <cuda/atomic>

#include "core/signal.h"
#include "cuda/launch.h"

namespace pycomm::cuda {

__device__ inline std::uint64_t now_ns() {
#if defined(__CUDA_ARCH__)
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else  // in a test that runs kernels on the CPU
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(now).count());
#endif
}

template <class Word>
__device__ ::cuda::atomic_ref<Word, ::cuda::thread_scope_system> shared_word(void* address) {
  return ::cuda::atomic_ref<Word, ::cuda::thread_scope_system>(*static_cast<Word*>(address));
}

// Not inlined, so that waiting code holds no registers for it.
__device__ __noinline__ inline bool report(const RankLaunch& me, Reason reason, int r,
                                           const Operation& first, const Operation& other) {
  const auto failure = shared_word<std::uint64_t>(&me.mailbox->failure);
  if (failure.load(::cuda::std::memory_order_acquire) == 0) {
    me.mailbox->number = me.number;
    me.mailbox->first = first;
    me.mailbox->other = other;
    failure.store(abort_word(reason, r), ::cuda::std::memory_order_release);
  }
  return false;
}

// True if the host has aborted the group. The host knows the rank to blame.
__device__ inline bool aborted(const RankLaunch& me, int lane) {
  const auto word = shared_word<std::uint64_t>(&me.mailbox->lanes[lane].abort);
  if (word.load(::cuda::std::memory_order_acquire) == 0) return false;
  report(me, Reason::aborted, me.rank, me.operation, me.operation);
  return true;
}

// True if nobody need wait any longer: the host has aborted the group, or another lane of this rank has
// failed. Not inlined, as above.
__device__ __noinline__ inline bool given_up(const RankLaunch& me, int lane) {
  const auto failure = shared_word<std::uint64_t>(&me.mailbox->failure);
  return aborted(me, lane) || failure.load(::cuda::std::memory_order_relaxed) != 0;
}

}  // namespace pycomm::cuda

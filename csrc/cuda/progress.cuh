// What a kernel tells the host of a rank's operation: how far it is (core/signal.h), and its times
// (cuda/timing.h). The first thread of the first lane tells, as that lane sees it.
#pragma once

#include "cuda/failing.cuh"

namespace pycomm::cuda {

// The times of the operation that runs. They lie in shared memory, because algorithms have no registers
// left. For the same reason, the functions that tell are not inlined.
struct Times {
  std::uint64_t begun, arrived;
  std::uint32_t told;
};
__device__ inline Times& times() {
  __shared__ Times times;
  return times;
}

__device__ inline void show(const RankLaunch& me, std::uint64_t word) {
  shared_word<std::uint64_t>(&me.mailbox->progress[me.captured])
      .store(word, ::cuda::std::memory_order_relaxed);
}

__device__ inline std::uint64_t joined(Halves halves) {
  return std::uint64_t{halves.high} << 32 | halves.low;
}
__device__ inline Halves halves_of(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
}

// This rank has announced the operation, or another meeting of it. In packets, it is about to.
__device__ __noinline__ inline void tell_begin(const RankLaunch& me, const LaneState& state) {
  show(me, begun_word(me.number));
  const std::uint64_t begun = joined(state.begun);
  times() = {begun != 0 ? begun : now_ns(), joined(state.arrived), state.told};
}

// All ranks have announced it, or sent it in packets.
__device__ __noinline__ inline void note_arrival() {
  if (times().arrived == 0) times().arrived = now_ns();
}

// The meeting has succeeded. `last`: and so has the operation.
__device__ __noinline__ inline void tell_end(const RankLaunch& me, LaneState& state, bool last) {
  const auto [begun, arrived, told] = times();
  state.begun = halves_of(last ? 0 : begun);
  state.arrived = halves_of(last ? 0 : arrived);
  state.told = last ? told + 1 : told;
  if (!last) return;
  show(me, done_word(me.number));
  const std::uint64_t values[] = {begun, arrived, now_ns(), me.bytes, kind_word(me.operation)};
  for (std::size_t i = 0; i < Timing::kWords; ++i) {
    shared_word<std::uint64_t>(&me.mailbox->timings[told % kTimings].words[i])
        .store(timing_word(told, values[i]), ::cuda::std::memory_order_relaxed);
  }
}

}  // namespace pycomm::cuda

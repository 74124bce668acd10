// Random bits of many elements at once.
#pragma once

#include "core/rng.h"
#include "cuda/layout.h"

namespace pycomm::cuda {

// Room for a run's words, of each warp its own.
__device__ inline std::uint32_t* words_of_warp() {
  __shared__ std::uint32_t words[kThreads / 32][kRandomRun];
  return words[threadIdx.x / 32];
}

// The bits of a whole run, whose first element is `first`, into words_of_warp(), by all threads of a
// warp: each draws from two counters.
__device__ inline void draw_run(const Random& random, std::int64_t first) {
  std::uint32_t* const run = words_of_warp();
  __syncwarp();  // all threads have read the previous words
  for (int c = static_cast<int>(threadIdx.x % 32); c < 64; c += 32) {
    const RandomWords drawn = philox(random, static_cast<std::uint64_t>(first / 4 + c));
#pragma unroll
    for (int w = 0; w < 4; ++w) run[w * 64 + c] = drawn.word[w];
  }
  __syncwarp();
}

}  // namespace pycomm::cuda

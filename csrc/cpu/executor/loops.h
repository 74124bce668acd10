// Loops over the element arithmetic of core/, and ways to store their results.
#pragma once

#include "core/layout.h"
#include "core/types.h"

namespace pycomm::cpu {

// to[i] = from[0][i] op from[1][i] op ..., for i in [begin, begin + count); `to` points at element
// `begin`. `to` may be identical to one of the sources, but must not overlap one otherwise.
using ReduceLoop = void (*)(void* to, const void* const* from, int n_from, std::int64_t begin,
                            std::int64_t count, int ranks);

// Null if elements of the type have no such reduction. `last`: the loop also does what follows the last contribution (AVG's division).
ReduceLoop reduce_loop(DType dtype, ReduceOp op, bool last);

// The destination of a result. `stream` writes around the caches; it is for cache lines that
// another core holds, and for data that will not be read soon.
struct Target {
  std::byte* data;
  bool stream;
};

void copy(Target to, const std::byte* from, std::int64_t bytes);
void zero(float* to, std::int64_t n);

// Runs `loop` once over `count` elements and stores the result in every target.
void reduce(ReduceLoop loop, const Target* to, int n_to, const void* const* from, int n_from,
            std::int64_t count, std::int64_t element_size, int ranks);

// Prefetches cache lines that will be read soon. Addresses beyond the end of memory do no harm.
// This helps loops that read their data a second time, because the hardware prefetcher pauses
// meanwhile.
PYCOMM_HD void prefetch(const void* data, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(static_cast<const std::byte*>(data) + i);
  }
}

// Makes streamed stores visible before any later release store.
void stream_fence();

}  // namespace pycomm::cpu

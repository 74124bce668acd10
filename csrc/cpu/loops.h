// The loops over core/ arithmetic, and the ways to store what they make.
#pragma once

#include "core/layout.h"
#include "core/types.h"

namespace pycomm::cpu {

// to[i] = from[0][i] op from[1][i] op ..., for i in [begin, begin + count); `to` points at element
// `begin`. `to` may be one of the sources, never overlap one otherwise.
using ReduceLoop = void (*)(void* to, const void* const* from, int n_from, std::int64_t begin,
                            std::int64_t count, int ranks);

// `last` includes what happens once, after the last contribution (AVG's division).
ReduceLoop reduce_loop(DType dtype, ReduceOp op, bool last);

// Where a result goes. `stream` writes around the caches: for lines that another core holds, and
// for data that will not be read soon.
struct Target {
  std::byte* data;
  bool stream;
};

void copy(Target to, const std::byte* from, std::int64_t bytes);
void zero(float* to, std::int64_t n);

// Runs `loop` once over `count` elements and stores the result in every target.
void reduce(ReduceLoop loop, const Target* to, int n_to, const void* const* from, int n_from,
            std::int64_t count, std::int64_t element_size, int ranks);

// Asks for lines that will be read soon; beyond the end of memory it does no harm. For loops that
// visit what they have read once more: the processor's own prefetching pauses meanwhile.
PYCOMM_HD void prefetch(const void* data, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(static_cast<const std::byte*>(data) + i);
  }
}

// Makes streamed stores visible before whatever is released next.
void stream_fence();

}  // namespace pycomm::cpu

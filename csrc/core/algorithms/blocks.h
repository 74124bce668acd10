// Tensors that have a block per rank.
//
// Algorithms see such a tensor as if its blocks followed each other, each with comm.block() elements.
// An executor that is a BlockExecutor (core/executor.h) may hold the blocks apart from each other, and
// they may have fewer elements.
#pragma once

#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

// Element n of this rank's input, or output.
template <Executor Comm>
PYCOMM_HD Location input_at(Comm& comm, std::int64_t n) {
  if constexpr (BlockExecutor<Comm>) {
    return comm.input_at(n);
  } else {
    return comm.at(comm.input(), n);
  }
}
template <Executor Comm>
PYCOMM_HD Location output_at(Comm& comm, std::int64_t n) {
  if constexpr (BlockExecutor<Comm>) {
    return comm.output_at(n);
  } else {
    return comm.at(comm.output(), n);
  }
}

// How many elements of a tile block r of this rank's input, or output, has.
template <Executor Comm>
PYCOMM_HD std::int64_t input_count(Comm& comm, int r, const Range& tile) {
  if constexpr (BlockExecutor<Comm>) {
    return overlap(tile, comm.input_count(r));
  } else {
    return tile.count;
  }
}
template <Executor Comm>
PYCOMM_HD std::int64_t output_count(Comm& comm, int r, const Range& tile) {
  if constexpr (BlockExecutor<Comm>) {
    return overlap(tile, comm.output_count(r));
  } else {
    return tile.count;
  }
}

}  // namespace pycomm

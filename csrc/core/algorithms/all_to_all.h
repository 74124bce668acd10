// All-to-all: block r of rank s goes to rank r, as its block s.
//
//   1. Stage: each rank copies a tile of every other rank's block into its staging slot, its own
//      tile to its output, and signals.
//   2. Copy: each rank copies its tile from every peer's slot to its output, one tile behind, so that
//      it rarely waits for them. Each starts with the next rank, so that they do not all read from
//      one rank at the same time.
//
// Zero copy: if all inputs lie in windows, each rank reads its blocks in place, and the announcement
// replaces phase 1. The last wait makes sure that nobody still reads a rank's input.
//
// Per rank, for blocks of S bytes: (n-1) S read from peers; 1 signal per tile. Every byte crosses
// once, which is the least possible. Reference: the pairwise exchange of MPICH, Thakur, Rabenseifner,
// Gropp 2005.
//
// Slots: a rank stages tile t only after every peer has staged t-2, hence has copied t-4. So with
// kStagingSlots = 4 the slot of t-4 is free.
#pragma once

#include "core/algorithms/two_shot.h"

namespace pycomm {

namespace detail {

// Where this rank's output holds a chunk of rank r's block.
template <Executor Comm>
PYCOMM_HD Location received_at(Comm& comm, int r, const Chunk& chunk) {
  return output_at(comm, r * comm.block() + chunk.output);
}

// Phase 2.
template <Executor Comm, class Chunks>
PYCOMM_HD void receive_from_all(Comm& comm, const Chunks& chunks, std::int64_t t) {
  const int n = comm.size(), me = comm.rank();
  const Chunk mine = chunks(t, me);
  for (int i = 1; i < n; ++i) {
    const int r = (me + i) % n;
    const Location from =
        comm.zero_copy() ? comm.at(comm.input(r), mine.input) : slot_of(comm, r, t, mine);
    comm.copy(received_at(comm, r, mine), from, output_count(comm, r, chunks.tiles()[t]));
  }
}

}  // namespace detail

template <PlainExecutor Comm>
PYCOMM_HD void all_to_all(Comm& comm) {
  comm.announce();
  const InputBlocks<Comm> chunks{comm};
  const int n = comm.size(), me = comm.rank();
  const bool zero_copy = comm.zero_copy();
  const std::int64_t tiles = chunks.tiles().count();
  for (std::int64_t t = 0; t <= tiles; ++t) {
    if (t < tiles) {
      const Chunk mine = chunks(t, me);
      comm.copy(detail::received_at(comm, me, mine), input_at(comm, mine.input), mine.count);
      for (int i = 1; i < n && !zero_copy; ++i) {
        const Chunk chunk = chunks(t, (me + i) % n);
        comm.copy(detail::slot_of(comm, me, t, chunk), input_at(comm, chunk.input), chunk.count);
      }
      if (zero_copy) detail::receive_from_all(comm, chunks, t);
      comm.signal(kStaged);
    }
    if (t > 0) {
      comm.wait_all(kStaged, t);
      if (!zero_copy) detail::receive_from_all(comm, chunks, t - 1);
    }
  }
}

}  // namespace pycomm

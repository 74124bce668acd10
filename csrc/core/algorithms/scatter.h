// Scatter: block r of the root's tensor goes to rank r.
//
//   1. Stage: the root copies a tile of every other rank's block into its staging slot and signals.
//   2. Copy: each other rank copies its tile from there to its output and signals.
//
// Zero copy: if the root's input lies in its window, the other ranks read it in place, and nothing is
// staged.
//
// For blocks of S bytes: each rank other than the root reads S from it; 2 signals per tile.
//
// Slots: before the root stages tile t, it waits until every rank has copied tile t - kStagingSlots.
#pragma once

#include "core/algorithms/two_shot.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void scatter(Comm& comm) {
  comm.announce();
  const InputBlocks<Comm> chunks{comm};
  const int n = comm.size(), me = comm.rank(), root = comm.root();
  const bool zero_copy = comm.zero_copy(), is_root = me == root;
  const std::int64_t tiles = chunks.tiles().count();
  for (std::int64_t t = 0; t < tiles; ++t) {
    const Chunk mine = chunks(t, me);
    const Location to = output_at(comm, mine.output);
    if (is_root) {
      comm.wait_all(kReduced, t - kStagingSlots + 1);
      for (int i = 1; i < n && !zero_copy; ++i) {
        const Chunk chunk = chunks(t, (me + i) % n);
        comm.copy(detail::slot_of(comm, me, t, chunk), input_at(comm, chunk.input), chunk.count);
      }
      comm.copy(to, input_at(comm, mine.input), mine.count);
    }
    comm.signal(kStaged);
    if (!is_root) {
      comm.wait(root, kStaged, t + 1);
      comm.copy(
          to,
          zero_copy ? comm.at(comm.input(root), mine.input) : detail::slot_of(comm, root, t, mine),
          mine.count);
    }
    comm.signal(kReduced);
  }
  if (zero_copy && is_root) comm.wait_all(kReduced, tiles);
}

}  // namespace pycomm

// Broadcast: the root's tensor to everyone, in tiles; and the barrier, which is an announcement.
//
//   1. Stage: the root copies a tile into its staging slot and says so (zero copy: nothing to do).
//   2. Copy: every other rank copies it from there, and says so.
//
// S bytes read from the root per other rank; 2 steps per tile. With one node's memory between
// the ranks all of them can read the root's copy at once, which no tree betters.
#pragma once

#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void broadcast(Comm& comm) {
  comm.announce();
  const int root = comm.root();
  const bool zero_copy = comm.zero_copy(), is_root = comm.rank() == root;
  const Tiles tiles{comm.count(), zero_copy ? comm.count() : comm.slot_count()};
  for (std::int64_t t = 0; t < tiles.count(); ++t) {
    const Range tile = tiles[t];
    const Location tensor = comm.at(comm.output(), tile.begin);
    const Location shared =
        zero_copy ? comm.at(comm.output(root), tile.begin) : comm.slot(root, t % kStagingSlots);
    if (is_root) {
      comm.wait_all(kReduced, t - kStagingSlots + 1);
      if (!zero_copy) comm.copy(shared, tensor, tile.count);
    }
    comm.signal(kStaged);
    if (!is_root) {
      comm.wait(root, kStaged, t + 1);
      comm.copy(tensor, shared, tile.count);
    }
    comm.signal(kReduced);
  }
  if (zero_copy && is_root) comm.wait_all(kReduced, tiles.count());
}

template <PlainExecutor Comm>
PYCOMM_HD void barrier(Comm& comm) {
  comm.announce();
}

}  // namespace pycomm

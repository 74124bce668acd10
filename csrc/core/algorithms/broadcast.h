// Broadcast: copies the root's tensor to every other rank, tile by tile. The barrier is here, too:
// it is an announcement without data.
//
//   1. Stage: the root copies a tile into its staging slot and signals. With zero copy there is
//      nothing to copy: the other ranks read the root's tensor itself.
//   2. Copy: every other rank copies the tile from there and signals.
//
// Per rank other than the root, for S bytes: S read from the root; 2 signals per tile. All ranks of
// a node can read the root's copy at the same time, so a tree would not be faster.
//
// Slots: before the root stages tile t, it waits until every rank has copied tile t -
// kStagingSlots.
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

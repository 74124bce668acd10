// Gather: every rank's block, in rank order, on the root only.
//
//   1. Stage: each rank other than the root copies a tile of its block into its staging slot and
//      signals.
//   2. Gather: the root copies the tile of every rank to its output and signals.
//
// Zero copy: if the root's output lies in its window, each rank writes its block there, and the
// signal of phase 1 says so.
//
// For blocks of S bytes: the root reads (n-1) S from peers (zero copy: each other rank writes S to
// the root instead); 2 signals per tile. The root's memory limits every algorithm: a tree would only
// add copies.
//
// Slots: a rank stages tile t only after the root has gathered tile t - kStagingSlots.
#pragma once

#include "core/algorithms/blocks.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void gather(Comm& comm) {
  comm.announce();
  const int n = comm.size(), me = comm.rank(), root = comm.root();
  const bool zero_copy = comm.zero_copy(), is_root = me == root;
  const Tiles tiles{comm.count(), zero_copy ? comm.count() : comm.slot_count()};
  for (std::int64_t t = 0; t < tiles.count(); ++t) {
    const Range tile = tiles[t];
    const auto place = [&](int r) { return r * comm.block() + tile.begin; };
    const Location mine = input_at(comm, tile.begin);
    if (zero_copy || is_root) {
      comm.copy(is_root ? output_at(comm, place(me)) : comm.at(comm.output(root), place(me)), mine,
                tile.count);
    } else {
      comm.wait(root, kReduced, t - kStagingSlots + 1);
      comm.copy(comm.slot(me, t % kStagingSlots), mine, tile.count);
    }
    comm.signal(kStaged);
    for (int i = 1; i < n && is_root; ++i) {
      const int r = (me + i) % n;
      comm.wait(r, kStaged, t + 1);
      if (zero_copy) continue;
      comm.copy(output_at(comm, place(r)), comm.slot(r, t % kStagingSlots), tile.count);
    }
    comm.signal(kReduced);
  }
}

}  // namespace pycomm

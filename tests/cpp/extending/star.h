// Star all-reduce: rank 0 adds for all. It is the simplest algorithm;
// docs/contributing/extending.md uses it to show how an algorithm is added.
//
//   1. Stage: each rank except 0 copies its tile into its own staging slot and signals.
//   2. Reduce: rank 0 adds all n contributions of the tile, in rank order, into its output and its
//      own slot, and signals.
//   3. Copy: each other rank copies the result from there to its output, one tile behind, so that
//      it stages the next tile while rank 0 adds.
//
// For S bytes: rank 0 reads (n-1) S from peers, each other rank S; 2 signals per tile. Rounds once.
//
// Two slots suffice. A rank that stages tile t has seen that tile t-2 is reduced, so no rank reads
// its slot of t-2 any more. And rank 0 writes the result of t after all ranks have staged t, so
// they have copied the result of t-2.
// Reference: the reduction to a root and the broadcast of any textbook.
#pragma once

#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void star(Comm& comm) {
  comm.announce();
  const int n = comm.size(), me = comm.rank();
  const Tiles tiles{comm.count(), comm.slot_count()};
  for (std::int64_t t = 0; t <= tiles.count(); ++t) {
    if (t < tiles.count()) {
      const Range tile = tiles[t];
      const Location in = comm.at(comm.input(), tile.begin);
      const Location out = comm.at(comm.output(), tile.begin);
      if (me != 0) comm.copy(comm.slot(me, t % 2), in, tile.count);
      comm.signal(kStaged);
      if (me == 0) {
        comm.wait_all(kStaged, t + 1);
        comm.reduce(
            2, [&](int i) { return i == 0 ? out : comm.slot(0, t % 2); }, n,
            [&](int r) { return r == 0 ? in : comm.slot(r, t % 2); }, tile.count, true);
      }
      comm.signal(kReduced);  // by all: every rank signals each channel equally often
    }
    if (t > 0 && me != 0) {
      const Range tile = tiles[t - 1];
      comm.wait(0, kReduced, t);
      comm.copy(comm.at(comm.output(), tile.begin), comm.slot(0, (t - 1) % 2), tile.count);
    }
  }
}

}  // namespace pycomm

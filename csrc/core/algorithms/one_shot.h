// One-shot all-reduce: every rank reads every other rank's tensor. For small messages, where a
// single wait dominates the time.
//
//   1. Stage: each rank copies its tile into its own staging slot and signals. For the first tile,
//      the announcement of the operation is the signal, so a small message costs a single round.
//   2. Reduce: each rank adds all n contributions of the tile, in rank order, into its output.
//
// Per rank, for S bytes: S staged; (n-1) S read from peers; 1 signal per tile. Rounds once, at the
// end. The smallest messages are sent as packets instead (core/algorithms/packet.h).
//
// Two slots suffice: a peer that has signalled tile t has reduced tile t-1, and no rank signals t+1
// before it has seen every peer's signal for t.
//
// Reference: the "naive" all-to-all all-reduce; called one-shot in TensorRT-LLM and vLLM.
#pragma once

#include "core/algorithms/packet.h"
#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void one_shot(Comm& comm) {
  if constexpr (PacketExecutor<Comm>) {
    if (comm.fits_packets()) return one_shot_packets(comm);
  }
  const int n = comm.size(), me = comm.rank();
  const Tiles tiles{comm.count(), comm.slot_count()};
  const auto stage = [&](std::int64_t t) {
    const Range tile = tiles[t];
    comm.copy(comm.slot(me, t % 2), comm.at(comm.input(), tile.begin), tile.count);
  };

  if (tiles.count() > 0) stage(0);
  comm.announce();
  for (std::int64_t t = 0; t < tiles.count(); ++t) {
    if (t > 0) {
      stage(t);
      comm.signal(kStaged);
      comm.wait_all(kStaged, t);
    }
    const Range tile = tiles[t];
    comm.reduce(
        1, [&](int) { return comm.at(comm.output(), tile.begin); }, n,
        [&](int r) { return r == me ? comm.at(comm.input(), tile.begin) : comm.slot(r, t % 2); },
        tile.count, true);
  }
}

}  // namespace pycomm

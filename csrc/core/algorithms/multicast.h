// Multicast all-reduce (NVLink SHARP, "NVLS"): the switch between GPUs adds up what all ranks' windows
// hold at one place, and writes a result to that place in all of them. Only GPUs have such a switch.
//
//   1. Stage: each rank copies its tile into its own staging slot.
//   2. Reduce: each rank owns a chunk of the tile. It has the switch add up the chunk in all slots,
//      and write the result over the chunk in all slots.
//   3. Gather: each rank copies the tile from its own slot to its output, one tile behind.
//
// Zero copy: if all tensors lie at the same place of their windows, there is one tile and no staging.
// The announcement replaces phase 1, and one last wait replaces phase 3.
//
// Per rank, for S bytes: S/n loaded and S/n stored; two-shot loads and stores S. The rank's link
// carries S + S/n each way, because the switch reads and writes every rank's memory; two-shot's link
// carries 2 (n-1)/n S. 2 signals per tile (zero copy: 1).
//
// Only the owner loads a sum, so all ranks get the same bits. PTX promises neither the order nor the
// precision of the switch's sum, so these need not be the bits of a sum in rank order, nor of another
// machine. Sums of 16-bit floats are rounded by the switch, before an average is divided.
//
// Two slots suffice: when a rank stages tile t, it has gathered t-2 and has seen every peer's signal
// that the peer is done with all slots of t-2. A peer writes into slots of t only after all ranks
// have staged t.
//
// Reference: Klenk et al. 2020, "An In-Network Architecture for Accelerating Shared-Memory
// Multiprocessor Collectives"; NCCL's NVLS.
#pragma once

#include "core/algorithms/two_shot.h"

namespace pycomm {

template <MulticastExecutor Comm>
PYCOMM_HD void multicast(Comm& comm) {
  comm.announce();
  const EvenChunks<Comm> chunks{comm};
  const Tiles tiles = chunks.tiles();
  const int me = comm.rank();
  for (std::int64_t t = 0; t <= tiles.count(); ++t) {
    if (t < tiles.count()) {
      const Range tile = tiles[t];
      const Chunk mine = chunks(t, me);
      if (!comm.zero_copy()) {
        comm.copy(comm.slot(me, t % 2), comm.at(comm.input(), tile.begin), tile.count);
        comm.signal(kStaged);
        comm.wait_all(kStaged, t + 1);
      }
      comm.reduce_in_switch(
          [&](int r) {
            return comm.zero_copy() ? comm.at(comm.output(r), mine.output)
                                    : comm.at(comm.slot(r, t % 2), mine.slot);
          },
          [&](int r) {
            return comm.zero_copy() ? comm.at(comm.input(r), mine.input)
                                    : comm.at(comm.slot(r, t % 2), mine.slot);
          },
          mine.count);
      comm.signal(kReduced);
    }
    if (t > 0) {
      comm.wait_all(kReduced, t);
      if (!comm.zero_copy()) {
        const Range tile = tiles[t - 1];
        comm.copy(comm.at(comm.output(), tile.begin), comm.slot(me, (t - 1) % 2), tile.count);
      }
    }
  }
}

}  // namespace pycomm

// Reduce: the sum of all ranks' tensors, on the root only. Two-shot all-reduce
// (core/algorithms/two_shot.h) in which only the root gathers.
//
//   1. Stage: each rank copies the chunks that other ranks own into its staging slot.
//   2. Reduce: the owner of a chunk adds the n contributions in rank order and writes the result to
//      its own slot, or, if it is the root, to its output.
//   3. Gather: the root copies the other owners' results to its output, one tile behind.
//
// Zero copy: if all inputs and the root's output lie in windows, an owner reads every rank's tensor
// and writes the result into the root's.
//
// Per rank, for S bytes: (n-1)/n S read from peers in phase 2; the root reads as much again in
// phase 3 (zero copy: each other rank writes S/n to the root instead); 2 signals per tile (zero copy:
// 1). The bits are those of two-shot. So all ranks share the additions, which the root alone would
// do in n-1 S. Reference: Rabenseifner 2004, reduce for long vectors.
//
// Slots: a rank stages tile t only after every peer has staged t-1. Then the peers have reduced t-2,
// and the root has gathered t-3. So with kStagingSlots = 4 the slot of t-4 is free.
#pragma once

#include "core/algorithms/two_shot.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void reduce(Comm& comm) {
  comm.announce();
  const EvenChunks<Comm> chunks{comm};
  const int me = comm.rank(), root = comm.root();
  const bool zero_copy = comm.zero_copy(), is_root = me == root;
  const std::int64_t tiles = chunks.tiles().count();
  for (std::int64_t t = 0; t <= tiles; ++t) {
    if (t < tiles) {
      if (!zero_copy) detail::stage_for_owners(comm, chunks, t);
      const Chunk mine = chunks(t, me);
      detail::reduce_owned(
          comm, chunks, t, 1,
          [&](int) {
            if (zero_copy) return comm.at(comm.output(root), mine.output);
            return is_root ? output_at(comm, mine.output) : detail::slot_of(comm, me, t, mine);
          },
          true);
      comm.signal(kReduced);
    }
    if (t > 0 && is_root) {
      comm.wait_all(kReduced, t);
      if (!zero_copy) detail::gather_from_owners(comm, chunks, t - 1);
    }
  }
  // Peers may still be reading this rank's tensor.
  if (zero_copy && !is_root) comm.wait_all(kReduced, tiles);
}

}  // namespace pycomm

// Top-k all-reduce: a two-shot of lists. The tensor is cut into regions, one per owner
// (core/codecs/topk.h).
//
//   1. Stage: each rank selects its k largest elements and writes a list for every owner.
//   2. Reduce: each owner adds the lists of its region in rank order and writes its share of the
//      sums as one list.
//   3. Gather: each rank decodes all owners' lists into its output, its own first.
//
// Per rank, for lists of L bytes: at most 2 (n-1)/n L read from peers in phase 2 and (n-1)/n L in
// phase 3; 2 signals. An owner encodes its own list like the others, so that no rank has a more
// exact copy.
#pragma once

#include "core/executor.h"

namespace pycomm {

template <ListExecutor Comm>
PYCOMM_HD void topk_exchange(Comm& comm) {
  const int n = comm.size(), me = comm.rank();
  comm.announce();
  for (int owner = 0; owner < n; ++owner) comm.stage(owner);
  comm.signal(kStaged);
  comm.wait_all(kStaged, 1);
  comm.reduce();
  comm.signal(kReduced);
  comm.gather(me);
  comm.wait_all(kReduced, 1);
  for (int i = 1; i < n; ++i) comm.gather((me + i) % n);
}

}  // namespace pycomm

// Sharded average: each element of a bucket of gradients is averaged by the rank that owns it, which
// alone keeps the average. This is a reduce-scatter in which owners may have any elements.
//
//   1. Announce: the bucket is complete on every rank.
//   2. Average: each rank averages its own elements, from all ranks' windows, into its memory. If it
//      already has averages of earlier backwards, each rank's gradient is first added to them.
//
// For a bucket of S bytes, each rank reads S/n from every rank and writes S/n. 1 signal, which says that
// the bucket may be filled anew.
#pragma once

#include "core/executor.h"

namespace pycomm {

template <class Comm>
concept AverageExecutor = Signaller<Comm> && requires(Comm& comm) {
  comm.average();  // reads all ranks' buckets
};

template <AverageExecutor Comm>
PYCOMM_HD void sharded_average(Comm& comm) {
  comm.announce();
  comm.average();
  comm.signal(kReduced);
  comm.wait_all(kReduced, 1);
}

}  // namespace pycomm

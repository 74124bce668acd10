// Sharded optimizer step: every parameter's elements are divided among the ranks, and their owner
// alone holds their optimizer states.
//
//   1. Announce: gradients are complete on every rank, and no rank reads its parameters any more.
//   2. Measure, to clip or to look for infinities: each rank averages the gradients of its own
//      elements, from all ranks' windows, and writes the sum of squares of every 1,024 of them to all
//      ranks. Every rank adds these sums in one order (core/optim/square_sum.h), so all ranks get the
//      norm that a rank with all gradients would get, bit for bit.
//   3. For LAMB, the same with the sums of weights and directions, which give each parameter's ratio.
//   4. Update: each rank averages the gradients of its own elements, updates these in the cache, and
//      writes the new parameters to all ranks' windows.
//
// For gradients of G bytes and parameters of P bytes, each rank reads G in phase 4 and again in phases 2
// and 3, reads and writes 1/n of the states, and writes P: 1/n to each rank. An all-reduce, a step and
// no all-gather would move 2 G and all states. 1 signal, and 1 for each of phases 2, 3 and 4.
//
// Reduce-scatter, step and all-gather in one pass need windows: ZeRO (Rajbhandari et al. 2020, "ZeRO:
// memory optimizations toward training trillion parameter models") runs them one after the other.
#pragma once

#include "core/executor.h"

namespace pycomm {

template <class Comm>
concept ShardExecutor = Signaller<Comm> && requires(Comm& comm) {
  { comm.measures() } -> std::same_as<bool>;
  comm.measure();        // writes this rank's sums to all ranks
  comm.conclude_norm();  // reads all ranks' sums
  { comm.adapts() } -> std::same_as<bool>;
  comm.measure_ratios();
  comm.conclude_ratios();
  comm.update();  // writes this rank's elements to all ranks' parameters
};

// Signalled by each rank before it changes a parameter, so that a failure can be told from a failure
// that has left parameters half new.
inline constexpr Channel kUpdating = kUp;

template <ShardExecutor Comm>
PYCOMM_HD void sharded_step(Comm& comm) {
  comm.announce();
  std::int64_t measured = 0;
  if (comm.measures()) {
    comm.measure();
    comm.signal(kStaged);
    comm.wait_all(kStaged, ++measured);
    comm.conclude_norm();
  }
  if (comm.adapts()) {
    comm.measure_ratios();
    comm.signal(kStaged);
    comm.wait_all(kStaged, ++measured);
    comm.conclude_ratios();
  }
  comm.signal(kUpdating);
  comm.update();
  comm.signal(kReduced);
  comm.wait_all(kReduced, 1);
}

}  // namespace pycomm

// The table of all-reduce algorithms: one row per algorithm, in the order of the enum Algorithm.
// docs/contributing/extending.md shows how to add one.
#pragma once

#include "core/algorithms/multicast.h"
#include "core/algorithms/one_shot.h"
#include "core/algorithms/ring.h"
#include "core/algorithms/tree.h"
#include "core/algorithms/two_shot.h"
#include "core/operation.h"

namespace pycomm {

// A row.
//   kZeroCopy     reads and writes the tensors in place if all of them lie in windows.
//   kCoded        also runs with a block codec.
//   kPartialSums  ranks, or the switch, pass on sums of some of the contributions, so that they are
//                 not added in rank order. A single rank has no such sums; two-shot then runs
//                 instead.
struct OneShot {
  static constexpr Algorithm kAlgorithm = Algorithm::one_shot;
  static constexpr bool kZeroCopy = false, kCoded = false, kPartialSums = false;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    one_shot(comm);
  }
};

struct TwoShot {
  static constexpr Algorithm kAlgorithm = Algorithm::two_shot;
  static constexpr bool kZeroCopy = true, kCoded = true, kPartialSums = false;
  template <Executor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    if constexpr (Comm::kCoded) {
      two_shot(comm, comm.chunks());
    } else {
      two_shot(comm);
    }
  }
};

struct Ring {
  static constexpr Algorithm kAlgorithm = Algorithm::ring;
  static constexpr bool kZeroCopy = true, kCoded = true, kPartialSums = true;
  template <Executor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    ring(comm);
  }
};

struct Tree {
  static constexpr Algorithm kAlgorithm = Algorithm::tree;
  static constexpr bool kZeroCopy = true, kCoded = true, kPartialSums = true;
  template <Executor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    tree(comm);
  }
};

struct Multicast {
  static constexpr Algorithm kAlgorithm = Algorithm::multicast;
  static constexpr bool kZeroCopy = true, kCoded = false, kPartialSums = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    if constexpr (MulticastExecutor<Comm>) multicast(comm);  // the others' groups refuse it
  }
};

template <class... Rows>
struct AlgorithmTable {
  static constexpr int kCount = sizeof...(Rows);
  template <class... More>
  using With = AlgorithmTable<Rows..., More...>;

  PYCOMM_HD static constexpr bool allows_zero_copy(Algorithm algorithm) {
    return ((Rows::kAlgorithm == algorithm && Rows::kZeroCopy) || ...);
  }
  PYCOMM_HD static constexpr bool coded(Algorithm algorithm) {
    return ((Rows::kAlgorithm == algorithm && Rows::kCoded) || ...);
  }
  PYCOMM_HD static constexpr bool partial_sums(Algorithm algorithm) {
    return ((Rows::kAlgorithm == algorithm && Rows::kPartialSums) || ...);
  }

  // Calls visit(row) with the row that runs `algorithm` among `ranks` ranks.
  template <class Visit>
  static void visit(Algorithm algorithm, int ranks, Visit visit) {
    if (ranks == 1 && partial_sums(algorithm)) algorithm = Algorithm::two_shot;
    (void)((Rows::kAlgorithm == algorithm && (visit(Rows{}), true)) || ...);
  }
};

using Algorithms = AlgorithmTable<OneShot, TwoShot, Ring, Tree, Multicast>;
static_assert(Algorithms::kCount + 1 == kCountOf<Algorithm>, "one row each, none for automatic");

// True if the operation may use tensors in place when they lie in windows.
PYCOMM_HD constexpr bool allows_zero_copy(const Operation& operation) {
  return operation.collective != Collective::all_reduce ||
         Algorithms::allows_zero_copy(operation.algorithm);
}

}  // namespace pycomm

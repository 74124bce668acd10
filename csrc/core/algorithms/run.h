// The body that runs an operation, the same on every executor: an algorithm for all_reduce, one
// body for each other collective.
//
// kMovesOnly: the body moves elements without computing, so it needs their size but not their type.
#pragma once

#include "core/algorithms/broadcast.h"
#include "core/algorithms/table.h"

namespace pycomm {

struct ReduceScatter {
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    reduce_scatter(comm);
  }
};

struct AllGather {
  static constexpr bool kMovesOnly = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    all_gather(comm);
  }
};

struct Broadcast {
  static constexpr bool kMovesOnly = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    broadcast(comm);
  }
};

struct Barrier {
  static constexpr bool kMovesOnly = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    barrier(comm);
  }
};

// Calls visit(body) with the body that runs an uncompressed operation among `ranks` ranks.
template <class Visit>
void visit_body(const Operation& operation, int ranks, Visit visit) {
  switch (operation.collective) {
    case Collective::all_reduce:
      return Algorithms::visit(operation.algorithm, ranks, visit);
    case Collective::reduce_scatter:
      return visit(ReduceScatter{});
    case Collective::all_gather:
      return visit(AllGather{});
    case Collective::broadcast:
      return visit(Broadcast{});
    case Collective::barrier:
      return visit(Barrier{});
  }
}

template <PlainExecutor Comm>
void run(Comm& comm, const Operation& operation) {
  visit_body(operation, comm.size(), [&](auto body) { body.run(comm); });
}

// Runs an all-reduce on an executor with a block codec.
template <Executor Comm>
void run_coded(Comm& comm, Algorithm algorithm) {
  Algorithms::visit(algorithm, comm.size(), [&](auto row) {
    if constexpr (row.kCoded) row.run(comm);
  });
}

}  // namespace pycomm

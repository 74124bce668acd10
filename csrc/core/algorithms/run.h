// What runs an operation, on every executor: an algorithm for all_reduce, and one body each for the
// other collectives. kMovesOnly: needs the size of elements, not
// their type.
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

// Calls visit(body) with what runs the operation, uncompressed, among so many ranks.
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

// The all-reduce of an executor with a codec of blocks.
template <Executor Comm>
void run_coded(Comm& comm, Algorithm algorithm) {
  Algorithms::visit(algorithm, comm.size(), [&](auto row) {
    if constexpr (row.kCoded) row.run(comm);
  });
}

}  // namespace pycomm

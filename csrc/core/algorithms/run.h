// The body that runs an operation, the same on every executor: an algorithm for all_reduce, one
// body for each other collective.
//
// kMovesOnly: the body moves elements without computing, so an executor may count in bytes.
#pragma once

#include "core/algorithms/all_to_all.h"
#include "core/algorithms/broadcast.h"
#include "core/algorithms/gather.h"
#include "core/algorithms/reduce.h"
#include "core/algorithms/scatter.h"
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

struct Reduce {
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    reduce(comm);
  }
};

struct Gather {
  static constexpr bool kMovesOnly = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    gather(comm);
  }
};

struct Scatter {
  static constexpr bool kMovesOnly = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    scatter(comm);
  }
};

struct AllToAll {
  static constexpr bool kMovesOnly = true;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    all_to_all(comm);
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
    case Collective::reduce:
      return visit(Reduce{});
    case Collective::gather:
      return visit(Gather{});
    case Collective::scatter:
      return visit(Scatter{});
    case Collective::all_to_all:
      return visit(AllToAll{});
    case Collective::sharded_step:
      return;  // has executors of its own: core/algorithms/sharded_step.h
  }
}

template <PlainExecutor Comm>
void run(Comm& comm, const Operation& operation) {
  visit_body(operation, comm.size(), [&](auto body) { body.run(comm); });
}

// Runs an all-reduce or a reduce-scatter on an executor with a block codec.
template <Executor Comm>
void run_coded(Comm& comm, const Operation& operation) {
  if (operation.collective == Collective::reduce_scatter) {
    return reduce_scatter(comm, InputBlocks<Comm>{comm});
  }
  Algorithms::visit(operation.algorithm, comm.size(), [&](auto row) {
    if constexpr (row.kCoded) row.run(comm);
  });
}

}  // namespace pycomm

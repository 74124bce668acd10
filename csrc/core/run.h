// Runs an operation's algorithm on an executor.
#pragma once

#include "core/broadcast.h"
#include "core/one_shot.h"
#include "core/operation.h"
#include "core/ring.h"
#include "core/tree.h"
#include "core/two_shot.h"

namespace pycomm {

template <PlainExecutor Comm>
PYCOMM_HD void run(Comm& comm, const Operation& operation) {
  switch (operation.collective) {
    case Collective::all_reduce:
      switch (operation.algorithm) {
        case Algorithm::automatic:  // resolved before
        case Algorithm::one_shot:
          return one_shot(comm);
        case Algorithm::two_shot:
          return two_shot(comm);
        case Algorithm::ring:
          return ring(comm);
        case Algorithm::tree:
          return tree(comm);
      }
      return;
    case Collective::reduce_scatter:
      return reduce_scatter(comm);
    case Collective::all_gather:
      return all_gather(comm);
    case Collective::broadcast:
      return broadcast(comm);
    case Collective::barrier:
      return barrier(comm);
  }
}

}  // namespace pycomm

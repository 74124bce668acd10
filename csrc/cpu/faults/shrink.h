// How the survivors of a failed group agree on a smaller one. They use only the window that they
// share.
//
// 1. Each survivor aborts the group; the first abort word stays. Once it runs no operation any more,
//    it says that it has arrived.
// 2. It waits until every other rank has arrived or is gone. It does not wait for a rank that has
//    let others wait until the timeout, nor for ranks that the survivors exclude. It waits for no
//    rank longer than `patience`.
// 3. The lowest rank that has arrived reserves a window in its heap for all ranks that have
//    arrived. The window's place and members are the rank's proposal. It lies in the old window, so
//    it holds even if the rank dies. The first compare-and-swap on the decision word decides whose
//    proposal holds. If some ranks lose patience, several may propose.
// 4. Every rank maps the window that the decision names. A rank that is not among its members has
//    been left out, and can only give up.
//
// The new window starts with flags and sequences of its own, so nothing that a slow rank still
// writes in the old one can be mistaken for news. If a member dies after the decision, the first
// operation of the smaller group finds that out, and the smaller group is shrunk in turn.
//
// Reference: Bland, Bouteiller, Herault, Bosilca and Dongarra 2013, "Post-failure recovery of MPI
// communication capability" (revoke, agree and shrink).
#pragma once

#include <memory>
#include <vector>

#include "cpu/executor/comm.h"

namespace pycomm::cpu {

struct Survivors {
  std::shared_ptr<Window> window;
  std::vector<int> members;  // their ranks in the larger group, ascending
};

// Called once by each survivor, after it has aborted the group and has ended its operations. Throws
// GroupUnusable if this rank was left out, and OutOfMemory if no rank has room for the window. The
// ranks `excluded`, the same for every survivor, do not become members, even if they live.
// `interrupt` is called from time to time; if it throws, or if `stopped` becomes true, the others
// learn that this rank is gone.
Survivors shrink(const Window& window, const Comm& comm, const std::atomic<bool>& stopped,
                 Clock::duration patience, void (*interrupt)(),
                 const std::vector<int>& excluded = {});

}  // namespace pycomm::cpu

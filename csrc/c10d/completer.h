// Completes futures on threads of its own.
//
// Completing a future runs its callbacks. A callback may start another operation and wait for it,
// as torch's PowerSGD hook does, so it must not run on the thread that runs the operations. If all
// threads are busy in callbacks, another one starts.
#pragma once

#include <functional>

namespace pycomm::c10d {

// Calls `task` on another thread, soon.
void complete_elsewhere(std::function<void()> task);

}  // namespace pycomm::c10d

// Completes futures on threads of its own.
//
// Completing a future runs its callbacks. A callback may start another operation and wait for it,
// as torch's PowerSGD hook does, so it must not run on the thread that runs the operations. If all
// threads are busy in callbacks, another one starts.
#pragma once

#include <functional>

namespace pycomm::c10d {

// Starts a thread for tasks if there is none. Throws std::system_error if none can start.
void prepare_to_complete();

// Calls `task` on another thread, soon. If no thread can start, a busy one calls it later.
void complete_elsewhere(std::function<void()> task);

// At exit: waits for operations that will complete and for tasks, but only for a limited time. No
// task begins afterwards: Python code on these threads would crash the process while the interpreter
// finalizes.
void stop_completing();

// Exists while an operation runs on another thread, which will complete it.
class Completing {
 public:
  Completing();
  ~Completing();
  Completing(const Completing&) = delete;
  Completing& operator=(const Completing&) = delete;
};

}  // namespace pycomm::c10d

// The atomic accesses of code that is compiled for ThreadSanitizer. What is linked here in place of its
// runtime lets an observer know of each access to some memory, so that another fiber may come in between.
//
// A store that is not sequentially consistent may become visible after its thread has read something
// else. With `late_stores` such a store stays out of sight until the thread's next store, exchange or
// wait.
#pragma once

#include <cstddef>
#include <functional>

namespace pycomm::checker {

struct AtomicsObserver {
  std::function<bool(const volatile void* address)> observes;
  bool late_stores;
  std::function<std::size_t()> thread;
  std::function<void(const volatile void* address)> before_read, after_read;
  std::function<void(const volatile void* address)> before_write, after_write;
};

// Null: nobody observes.
void observe_atomics(const AtomicsObserver* observer);
// Makes the running thread's late store visible.
void finish_store();

}  // namespace pycomm::checker

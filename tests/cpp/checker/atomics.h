// Observes the atomic accesses of code that is compiled for ThreadSanitizer. This library replaces
// ThreadSanitizer's runtime: it tells an observer about each access to observed memory, so that
// another fiber may run in between.
//
// A store that is not sequentially consistent may become visible after its thread has read
// something else. With `late_stores`, such a store stays invisible until the thread's next store,
// exchange or wait.
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
  // For vector clocks: the memory order (__ATOMIC_*) of a load, once it has its value, and of a store
  // or an exchange, when its thread comes to it.
  std::function<void(const volatile void* address, int order)> loaded = nullptr, stores = nullptr;
};

// Sets the observer; null for none.
void observe_atomics(const AtomicsObserver* observer);
// Makes the running thread's late store visible.
void finish_store();

}  // namespace pycomm::checker

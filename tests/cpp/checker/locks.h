// Locks of fibers. locks.cpp replaces the system's mutexes: another fiber may run before a mutex is
// taken and after it has been given back.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "checker/fibers.h"

namespace pycomm::checker {

class Locks {
 public:
  using Note = std::function<void(const void* mutex)>;
  // For vector clocks, `taken` and `given` are told when a fiber takes a mutex and gives it back.
  explicit Locks(
      Fibers& fibers, Note taken = [](const void*) {}, Note given = [](const void*) {})
      : fibers_(fibers), taken_(std::move(taken)), given_(std::move(given)) {}

  void lock(const void* mutex);
  bool try_lock(const void* mutex);
  void unlock(const void* mutex);
  // Gives a mutex back, waits, and takes it again, as a condition variable does.
  void wait(const void* mutex, std::function<bool()> condition, std::function<std::string()> what);

 private:
  void give(const void* mutex);

  Fibers& fibers_;
  const Note taken_, given_;
  std::map<const void*, bool> locked_;  // by mutex
};

// Sets the locks of the running fibers; null for none: one real thread needs no locks.
void use_locks(Locks* locks);

}  // namespace pycomm::checker

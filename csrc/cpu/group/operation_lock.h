// The lock that a group holds while it runs an operation.
#pragma once

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace pycomm::cpu {

// Thrown if the group is closed, has failed, or belongs to the parent of a forked process.
class GroupUnusable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A signal's handler may call the group again in the middle of an operation, on the same thread.
// That thread must not wait for itself, so it gets an error.
class OperationLock {
 public:
  // Throws GroupUnusable if this thread already holds the lock.
  void lock();
  bool try_lock();
  void unlock();
  void check_not_held() const;

 private:
  bool mine() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

}  // namespace pycomm::cpu

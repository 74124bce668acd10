// What keeps a group's operations apart, and refuses those that would wait for themselves.
#pragma once

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace pycomm::cpu {

// The group is closed, has failed, or belongs to the parent of a forked process.
class GroupUnusable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Held while an operation runs. In the middle of one a signal's handler may come back on the same
// thread, which must not wait for itself.
class OperationLock {
 public:
  // Throws GroupUnusable if this thread has it already.
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

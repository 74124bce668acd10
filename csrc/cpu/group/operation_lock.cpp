#include "cpu/group/operation_lock.h"

namespace pycomm::cpu {

void OperationLock::lock() {
  check_not_held();
  mutex_.lock();
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
}

bool OperationLock::try_lock() {
  if (mine() || !mutex_.try_lock()) return false;
  owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  return true;
}

void OperationLock::unlock() {
  owner_.store({}, std::memory_order_relaxed);
  mutex_.unlock();
}

void OperationLock::check_not_held() const {
  if (!mine()) return;
  throw GroupUnusable(
      "group is in the middle of an operation on this thread: a signal's handler may only abort() "
      "the group");
}

}  // namespace pycomm::cpu

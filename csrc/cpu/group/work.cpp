#include "cpu/group/work.h"

#include "cpu/executor/waiting.h"
#include "cpu/group/fork.h"
#include "cpu/group/group.h"
#include "cpu/observe/ticks.h"

namespace pycomm::cpu {

Work::Work(Group& group) : forks_(current_forks()), told_(group.told_), group_(&group) {}

bool Work::wait(Clock::duration patience) {
  std::unique_lock lock(mutex_);
  if (!completed_ && forks_ != current_forks()) {
    throw GroupUnusable("the operation belongs to the parent of this forked process");
  }
  if (!done_.wait_for(lock, patience, [&] { return completed_; })) return false;
  if (error_) {
    *told_ = true;
    std::rethrow_exception(error_);
  }
  return true;
}

void Work::wait(void (*interrupt)()) {
  {
    const std::lock_guard lock(mutex_);
    if (awaited_since_ == 0) awaited_since_ = ticks();
  }
  while (!wait(kInterruptEvery)) {
    if (interrupt == nullptr) continue;
    try {
      interrupt();
    } catch (...) {
      // The worker must stop using the buffers before the caller frees them.
      abort_group();
      try {
        while (!wait(std::chrono::seconds(1))) continue;
      } catch (const std::exception&) {
      }
      throw;
    }
  }
}

// A group lives at least until all of its works have completed.
void Work::abort_group() {
  const std::lock_guard lock(group_mutex_);
  if (group_ != nullptr) group_->abort();
}

bool Work::completed() const {
  const std::lock_guard lock(mutex_);
  return completed_;
}

bool Work::nonfinite() const {
  const std::lock_guard lock(mutex_);
  return nonfinite_;
}

std::int64_t Work::awaited_since() const {
  const std::lock_guard lock(mutex_);
  return awaited_since_;
}

Interval Work::interval() const {
  const std::lock_guard lock(mutex_);
  return interval_;
}

std::int64_t Work::moved() const {
  const std::lock_guard lock(mutex_);
  return moved_;
}

void Work::complete(bool nonfinite, std::exception_ptr error, Interval interval,
                    std::int64_t moved) {
  {
    const std::lock_guard lock(group_mutex_);
    group_ = nullptr;
  }
  const std::lock_guard lock(mutex_);
  completed_ = true;
  interval_ = interval;
  moved_ = moved;
  nonfinite_ = nonfinite;
  error_ = std::move(error);
  done_.notify_all();
}

}  // namespace pycomm::cpu

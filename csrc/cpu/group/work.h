// A handle of submitted operations, which the group's worker runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

struct Interval {
  Clock::time_point begin;
  Clock::time_point end;
};

class Group;

// A function that the worker calls when submitted work has completed, with the work's error or
// null. It must not wait for the group.
struct Completion {
  void (*function)(void* context, std::exception_ptr error) = nullptr;
  void* context = nullptr;
};

// Submitted operations, as a future.
class Work {
 public:
  explicit Work(Group& group);

  // Returns true if the work has completed within `patience`. Throws what the operation threw.
  bool wait(Clock::duration patience);
  // Waits without a limit. `interrupt` is called from time to time; if it throws, the group is
  // aborted.
  void wait(void (*interrupt)());
  bool completed() const;
  // For a completed compressed operation, what run() returns.
  bool nonfinite() const;
  // The times at which the worker began and ended; valid once the work has completed.
  Interval interval() const;
  // The bytes read from and written to other ranks' memory, or received from other nodes.
  std::int64_t moved() const;

 private:
  friend class Group;
  // The tick since which a thread waits for this work, or 0.
  std::int64_t awaited_since() const;
  void complete(bool nonfinite, std::exception_ptr error, Interval interval, std::int64_t moved);
  void abort_group();

  const unsigned forks_;
  mutable std::mutex mutex_;
  std::condition_variable done_;
  bool completed_ = false;
  std::int64_t awaited_since_ = 0;
  bool nonfinite_ = false;
  std::exception_ptr error_;
  const std::shared_ptr<std::atomic<bool>> told_;  // shared with the group
  Interval interval_;
  std::int64_t moved_ = 0;
  std::mutex group_mutex_;  // separate from mutex_: an abort may wait for the interpreter
  Group* group_;            // null once the work has completed
};

}  // namespace pycomm::cpu

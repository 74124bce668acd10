// A handle of submitted operations, which the group's worker runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "cpu/store_policy.h"

namespace pycomm::cpu {

struct Interval {
  Clock::time_point begin;
  Clock::time_point end;
};

class Group;

// Operations in flight.
class Work {
 public:
  explicit Work(Group& group);

  // Returns whether it has completed within `patience`; throws what the operation threw.
  bool wait(Clock::duration patience);
  // The same without end. `interrupt` is called now and then; what it throws aborts the group.
  void wait(void (*interrupt)());
  bool completed() const;
  // For a completed compressed operation, what run() returns.
  bool nonfinite() const;
  // When the worker began and ended; once it has completed.
  Interval interval() const;
  // Bytes read from and written to other ranks' memory, or received from other nodes.
  std::int64_t moved() const;

 private:
  friend class Group;
  void complete(bool nonfinite, std::exception_ptr error, Interval interval, std::int64_t moved);
  void abort_group();

  mutable std::mutex mutex_;
  std::condition_variable done_;
  bool completed_ = false;
  bool nonfinite_ = false;
  std::exception_ptr error_;
  const std::shared_ptr<std::atomic<bool>> told_;  // the group's
  Interval interval_;
  std::int64_t moved_ = 0;
  std::mutex group_mutex_;  // not the other one: an abort may have to wait for the interpreter
  Group* group_;            // null once it has completed
};

}  // namespace pycomm::cpu

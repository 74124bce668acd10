// The duration of a wait, counting only time in which this process was running.
//
// A process that was stopped, frozen or paused with its machine could not hear from others, and the
// processes that it waits for were probably paused as well. So the time between two looks at the
// clock counts for no more than a busy machine may cause.
#pragma once

#include <algorithm>
#include <chrono>

#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

class WaitingTime {
 public:
  explicit WaitingTime(Clock::time_point start = Clock::now()) : seen_(start) {}

  // Call it several times per kLongestGap.
  Clock::duration until(Clock::time_point now) {
    waited_ += std::min<Clock::duration>(now - seen_, kLongestGap);
    seen_ = now;
    return waited_;
  }
  // The time until the last call.
  Clock::duration time() const { return waited_; }
  double seconds() const { return std::chrono::duration<double>(waited_).count(); }
  // Starts again from the last call.
  void restart() { waited_ = {}; }

 private:
  static constexpr auto kLongestGap = std::chrono::milliseconds(100);

  Clock::time_point seen_;
  Clock::duration waited_ = {};
};

}  // namespace pycomm::cpu

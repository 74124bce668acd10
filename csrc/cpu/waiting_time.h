// How long a wait has taken, as far as this process was running.
//
// A process that was stopped, frozen or paused with its machine has heard nobody meanwhile, and has
// most likely slept together with those it waits for. So a gap between two looks at the clock counts
// for no more than a busy machine may cause.
#pragma once

#include <algorithm>
#include <chrono>

#include "cpu/store_policy.h"

namespace pycomm::cpu {

class WaitingTime {
 public:
  explicit WaitingTime(Clock::time_point start = Clock::now()) : seen_(start) {}

  // To be called several times in kLongestGap.
  Clock::duration until(Clock::time_point now) {
    waited_ += std::min<Clock::duration>(now - seen_, kLongestGap);
    seen_ = now;
    return waited_;
  }
  // Until the last look.
  Clock::duration time() const { return waited_; }
  double seconds() const { return std::chrono::duration<double>(waited_).count(); }
  // Counts from the last look on.
  void restart() { waited_ = {}; }

 private:
  static constexpr auto kLongestGap = std::chrono::milliseconds(100);

  Clock::time_point seen_;
  Clock::duration waited_ = {};
};

}  // namespace pycomm::cpu

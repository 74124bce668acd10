// The cheapest clock there is: the processor's counter, which all cores of a machine share. Times
// taken from it are converted only when somebody reads them.
#pragma once

#include <cstdint>

#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

// False if the counter's speed changes; then the steady clock takes its place, in nanoseconds.
extern const bool counter_is_steady;

inline std::int64_t ticks() {
#if defined(__x86_64__)
  if (counter_is_steady) return static_cast<std::int64_t>(__builtin_ia32_rdtsc());
#elif defined(__aarch64__)
  std::int64_t count = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#endif
  return Clock::now().time_since_epoch().count();
}

// Converts ticks to seconds of the steady clock.
class TickScale {
 public:
  // Waits until the process is 20 ms old, to know the counter's speed.
  static TickScale now();

  double time() const { return seconds_; }  // when the scale was made
  double seconds_per_tick() const { return seconds_per_tick_; }
  double seconds(std::int64_t tick) const {
    // Unsigned, because a damaged tick must not overflow.
    const auto since = static_cast<std::uint64_t>(tick) - static_cast<std::uint64_t>(tick_);
    return seconds_ + static_cast<double>(static_cast<std::int64_t>(since)) * seconds_per_tick_;
  }

 private:
  TickScale(std::int64_t tick, double seconds, double seconds_per_tick)
      : tick_(tick), seconds_(seconds), seconds_per_tick_(seconds_per_tick) {}

  std::int64_t tick_;
  double seconds_;
  double seconds_per_tick_;
};

}  // namespace pycomm::cpu

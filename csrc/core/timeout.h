// Timeouts as callers pass them: in seconds.
#pragma once

#include <chrono>
#include <string>

#include "core/types.h"

namespace pycomm {

// About 32 years; clocks in nanoseconds overflow after 292.
inline constexpr std::int64_t kMostSeconds = 1'000'000'000;

// False for NaN.
constexpr bool is_timeout(double seconds) {
  return seconds > 0 && seconds <= static_cast<double>(kMostSeconds);
}

// Throws std::invalid_argument unless is_timeout(seconds).
inline std::chrono::steady_clock::duration timeout_of(double seconds) {
  PYCOMM_CHECK(is_timeout(seconds), "timeout must be positive and at most " +
                                        std::to_string(kMostSeconds) + " s, got " +
                                        std::to_string(seconds));
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace pycomm

// How a rank stores data that another core will read: through its caches, or around them
// (streamed).
//
// If cores share a cache, lines move between them quickly, and plain stores are two to three times
// as fast. If they do not (another socket or core complex, or a virtual machine that has been
// moved), a plain store waits for a line that the reader still holds: 2.4 GB/s were measured,
// against more than 50 with streamed stores. Which case applies can change while a program runs. So
// the policy times its own plain stores, switches to streaming after two slow ones, and tries plain
// stores again from time to time. The policy does not affect results, so ranks may differ in it.
#pragma once

#include <chrono>
#include <cstdint>

namespace pycomm::cpu {

using Clock = std::chrono::steady_clock;

// An output of this size would leave the caches before anyone reads it. Streamed stores save the
// reading of each line that a plain store does first.
inline constexpr std::int64_t kStreamedOutput = 16 << 20;

class StorePolicy {
 public:
  // Measures the time of plain stores during its lifetime.
  class Timer {
   public:
    Timer(StorePolicy* policy, std::int64_t bytes) : policy_(policy), bytes_(bytes) {
      if (policy_ != nullptr) start_ = Clock::now();
    }
    ~Timer() {
      if (policy_ != nullptr) policy_->report(bytes_, Clock::now() - start_);
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

   private:
    StorePolicy* policy_;
    std::int64_t bytes_;
    Clock::time_point start_;
  };

  // True if the next operation, which stores `bytes` bytes, should stream.
  bool next(std::int64_t bytes) {
    streaming_ = false;
    if (bytes < kMeasured || slow_ < 2) return false;
    if (++since_probe_ >= kProbeEvery) {
      since_probe_ = 0;
      slow_ = 1;  // one more slow store resumes streaming
      return false;
    }
    return streaming_ = true;
  }

  Timer time(bool shared, std::int64_t bytes) {
    return Timer(shared && !streaming_ && bytes >= kMeasured ? this : nullptr, bytes);
  }

 private:
  static constexpr std::int64_t kMeasured = 32 << 10;
  static constexpr double kSlowBytesPerSecond = 6e9;
  static constexpr int kProbeEvery = 64;

  void report(std::int64_t bytes, Clock::duration took) {
    const double seconds = std::chrono::duration<double>(took).count();
    const bool slow = static_cast<double>(bytes) < seconds * kSlowBytesPerSecond;
    slow_ = slow ? slow_ + 1 : 0;
  }

  bool streaming_ = false;
  int slow_ = 0;
  int since_probe_ = 0;
};

}  // namespace pycomm::cpu

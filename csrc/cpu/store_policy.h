// How a rank stores data that another core will read: through its caches, or around them.
//
// Cores that share a cache pass lines on quickly, and plain stores win by a factor of two to three.
// Cores that do not (another socket, another complex, or a virtual machine that was moved) make a
// plain store wait for the line that the reader still holds: 2.4 GB/s were seen, against more than
// 50 with streamed stores. Which of the two holds can change while a program runs, so the policy
// times its own plain stores, streams after two slow ones, and tries plain stores again from time
// to time. It changes no result, so ranks may differ in it.
#pragma once

#include <chrono>
#include <cstdint>

namespace pycomm::cpu {

using Clock = std::chrono::steady_clock;

class StorePolicy {
 public:
  // Times one piece of plain stores while it lives.
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

  // Whether the next operation, of so many bytes, streams.
  bool next(std::int64_t bytes) {
    streaming_ = false;
    if (bytes < kMeasured || slow_ < 2) return false;
    if (++since_probe_ >= kProbeEvery) {
      since_probe_ = 0;
      slow_ = 1;  // one more slow one suffices to go on streaming
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

// What a waiting rank checks, and how often.
#pragma once

#include <atomic>
#include <chrono>

#include "core/algorithms/packet.h"
#include "core/signal.h"
#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

// A wait polls for a while, then polls and yields the core between polls, and sleeps once the peer
// is clearly busy. If ranks share cores, it yields at once and sleeps sooner, because the peer
// needs the core. If other programs want the cores, it sleeps instead of yielding (Yielding).
inline constexpr int kSpins = 400;  // 20 us
inline constexpr auto kYieldFor = std::chrono::milliseconds(2);
inline constexpr auto kYieldBriefly = std::chrono::microseconds(100);
inline constexpr auto kLongYield = std::chrono::microseconds(200);
inline constexpr auto kNoYieldsFor = std::chrono::milliseconds(100);
inline constexpr auto kNap = std::chrono::microseconds(20);
inline constexpr auto kLongestSleep = std::chrono::milliseconds(10);
inline constexpr auto kLookEvery = std::chrono::milliseconds(1);
inline constexpr auto kInterruptEvery = std::chrono::milliseconds(50);

// If a waiting rank has not looked for messages for this time, its process or its core is stopped.
inline constexpr auto kStoppedAfter = std::chrono::milliseconds(200);

// What a rank shows while it waits for a message: 1 + the sender, and the time of the last look.
inline std::uint64_t message_wait_word(int sender, Clock::time_point looked) {
  const auto time =
      std::chrono::duration_cast<std::chrono::milliseconds>(looked.time_since_epoch());
  return static_cast<std::uint64_t>(time.count()) << 16 | static_cast<std::uint16_t>(sender + 1);
}
// The sender that a rank waits for; -1 if there is none, or if the rank is stopped.
inline int awaited_sender(std::uint64_t word, Clock::time_point now) {
  const Clock::time_point looked(std::chrono::milliseconds(word >> 16));
  return now - looked > kStoppedAfter ? -1 : static_cast<int>(word & 0xffff) - 1;
}

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether a wait yields its core or sleeps.
//
// It yields at first, as long as the core comes back quickly. But a program that computes keeps a
// core that it is given for a slice of the scheduler's time, about 3 ms on Linux, and the wait then
// takes as long. A thread that sleeps gets a core soon after it is woken, because it has used less
// than its share. So after a yield that has taken long, waits sleep at once for a while.
class Yielding {
 public:
  explicit Yielding(Clock::duration most) : most_(most) {}

  // True if a wait that began at `start` should yield now.
  bool pays(Clock::time_point start, Clock::time_point now) const {
    return now - start < most_ && now >= again_at_;
  }
  // After a yield.
  void took(Clock::time_point from, Clock::time_point to) {
    if (to - from > kLongYield) again_at_ = to + kNoYieldsFor;
  }

 private:
  Clock::duration most_;
  Clock::time_point again_at_ = {};
};

PYCOMM_HD bool has_come(const std::atomic<std::uint32_t>& flag, std::uint32_t target) {
  return reached(flag.load(std::memory_order_acquire), target);
}

// Only this operation's packet counts: the place may have been idle long enough for epochs to wrap
// around.
PYCOMM_HD bool has_come(const std::atomic<std::uint64_t>& packet, std::uint32_t target) {
  return packet_sequence(packet.load(std::memory_order_relaxed)) == target;
}

}  // namespace pycomm::cpu

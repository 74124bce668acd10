// What a rank that waits looks at, and how often.
#pragma once

#include <atomic>
#include <chrono>

#include "core/algorithms/packet.h"
#include "core/signal.h"

namespace pycomm::cpu {

// How a wait spends its time: a few polls (none where ranks share cores: the peer needs this one),
// then polls with the core offered to others, and sleep once the peer is clearly busy with something
// else. Where ranks share cores that is sooner: those that work would wait for those that poll.
inline constexpr int kSpins = 20;
inline constexpr auto kYieldFor = std::chrono::milliseconds(2);
inline constexpr auto kYieldBriefly = std::chrono::microseconds(100);
inline constexpr auto kNap = std::chrono::microseconds(20);
inline constexpr auto kLongestSleep = std::chrono::milliseconds(10);
inline constexpr auto kLookEvery = std::chrono::milliseconds(1);
inline constexpr auto kInterruptEvery = std::chrono::milliseconds(50);

PYCOMM_HD bool has_come(const std::atomic<std::uint32_t>& flag, std::uint32_t target) {
  return reached(flag.load(std::memory_order_acquire), target);
}

// Exactly this operation's: a place may have been left alone for longer than epochs can tell.
PYCOMM_HD bool has_come(const std::atomic<std::uint64_t>& packet, std::uint32_t target) {
  return packet_sequence(packet.load(std::memory_order_relaxed)) == target;
}

}  // namespace pycomm::cpu

// Channels, on which ranks signal progress, and the abort word, with which a rank ends a group.
//
// A channel is a counter that only grows, modulo 2^32, and is never reset. Within an operation, an
// algorithm counts steps 1, 2, 3, ... on a channel. The stored value is the channel's epoch, which
// is its value at the start of the operation, plus the step. For a step to mean the same on every
// rank, all rely on one rule: in each operation, every rank signals each channel equally often.
#pragma once

#include "core/types.h"

namespace pycomm {

// A rank's channels. The names fit the shot algorithms; ring and tree use the channels in their own
// way.
enum Channel : int { kStaged, kReduced, kUp, kDown };
inline constexpr int kChannels = 4;

// The number of staging slots that an algorithm rotates through.
inline constexpr int kStagingSlots = 4;

PYCOMM_HD constexpr bool reached(std::uint32_t flag, std::uint32_t target) {
  return static_cast<std::int32_t>(flag - target) >= 0;
}

inline constexpr std::int64_t kPlain = -1;

// A place in the memory of some rank. If `rank` is not the caller, accesses count as traffic.
struct Location {
  std::byte* data;
  int rank;
  std::int64_t coded = kPlain;  // for encoded elements: the index in the tile that begins at `data`
};

// What one rank did in one operation.
struct Traffic {
  std::int64_t steps = 0;      // signals sent
  std::int64_t bytes_in = 0;   // read from other ranks' memory
  std::int64_t bytes_out = 0;  // written to other ranks' memory
};

// What a rank sent to other nodes and received from them in one operation, in bytes.
struct LinkTraffic {
  std::int64_t sent = 0;
  std::int64_t received = 0;
};

enum class Reason : std::uint8_t {
  none,
  peer_died,
  timeout,
  mismatch,
  aborted,
  malformed,
  returned
};

// The abort word: the reason and the rank to blame; for a timeout, also the rank that waited and
// how long; for a message that does not match, also its receiver. The first word written stays.
inline constexpr std::uint64_t kField = (1u << 20) - 1;
inline constexpr std::uint64_t kTenths = kField >> 1;  // the longest time, 14 hours
inline constexpr std::uint64_t kFromAnyRank = std::uint64_t{1} << 59;

PYCOMM_HD constexpr std::uint64_t abort_word(Reason reason, int rank) {
  return static_cast<std::uint64_t>(reason) << 60 | (static_cast<std::uint64_t>(rank) & kField);
}
PYCOMM_HD constexpr std::uint64_t timeout_word(int rank, int waiter, double seconds) {
  const double tenths = 10 * seconds;
  const auto most = static_cast<double>(kTenths);
  return abort_word(Reason::timeout, rank) | static_cast<std::uint64_t>(waiter + 1) << 20 |
         static_cast<std::uint64_t>(tenths < most ? tenths : most) << 40;
}
// Rank `waiter` has waited for a message that any rank could send. It blames itself.
PYCOMM_HD constexpr std::uint64_t any_source_timeout_word(int waiter, double seconds) {
  return timeout_word(waiter, waiter, seconds) | kFromAnyRank;
}
// Rank `receiver` has received a message from `sender` that is not what it wants.
PYCOMM_HD constexpr std::uint64_t mismatch_word(int sender, int receiver) {
  return abort_word(Reason::mismatch, sender) | static_cast<std::uint64_t>(receiver + 1) << 20;
}
PYCOMM_HD constexpr Reason reason_of(std::uint64_t word) { return static_cast<Reason>(word >> 60); }
PYCOMM_HD constexpr int rank_of(std::uint64_t word) { return static_cast<int>(word & kField); }
// The rank whose wait timed out, or the receiver of a message that does not match; -1 if the word
// does not say.
PYCOMM_HD constexpr int waiter_of(std::uint64_t word) {
  return static_cast<int>(word >> 20 & kField) - 1;
}
PYCOMM_HD constexpr double seconds_of(std::uint64_t word) {
  return static_cast<double>(word >> 40 & kTenths) / 10;
}
PYCOMM_HD constexpr bool from_any_rank(std::uint64_t word) { return (word & kFromAnyRank) != 0; }
// True if a word that another process wrote gives a reason and names only ranks below `ranks`.
PYCOMM_HD constexpr bool is_abort_word(std::uint64_t word, int ranks) {
  const Reason reason = reason_of(word);
  return reason > Reason::none && reason <= Reason::returned && rank_of(word) < ranks &&
         waiter_of(word) < ranks;
}

// How far a device is with the operations that are launched on it, numbered from 1: the last one that
// it has begun, and whether that has succeeded. The word grows, unless graphs are replayed.
PYCOMM_HD constexpr std::uint64_t begun_word(std::uint32_t number) {
  return std::uint64_t{number} << 1;
}
PYCOMM_HD constexpr std::uint64_t done_word(std::uint32_t number) { return begun_word(number) | 1; }
constexpr std::uint32_t number_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 1);
}

}  // namespace pycomm

// Epochs, and the word with which a rank stops all others.
//
// A flag only ever grows, modulo 2^32, and is never reset. Within an operation an algorithm speaks
// of steps 1, 2, 3, ... on a channel; what is stored is the channel's value at the operation's start plus
// the step. That a step means the same on every rank rests on one rule: in an operation every rank
// signals each channel equally often.
#pragma once

#include "core/types.h"

namespace pycomm {

// A rank's flags. `staged` and `reduced` serve the shot algorithms; ring and tree give them their own meaning.
enum Channel : int { kStaged, kReduced, kUp, kDown };
inline constexpr int kChannels = 4;

// Staging slots that an algorithm rotates through.
inline constexpr int kStagingSlots = 4;

PYCOMM_HD constexpr bool reached(std::uint32_t flag, std::uint32_t target) {
  return static_cast<std::int32_t>(flag - target) >= 0;
}

inline constexpr std::int64_t kPlain = -1;

// A piece of some rank's memory; where `rank` is not the caller's, its use is traffic.
struct Location {
  std::byte* data;
  int rank;
  std::int64_t coded = kPlain;  // of encoded elements: which one, in the tile that begins at `data`
};

// What one rank did in one operation.
struct Traffic {
  std::int64_t steps = 0;      // signals published
  std::int64_t bytes_in = 0;   // read from other ranks' memory
  std::int64_t bytes_out = 0;  // written to other ranks' memory
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

// The abort word: the reason and the rank to blame; of a timeout also who has waited for that rank,
// and for how long. The first one written stays.
//
//   | reason: 4 bits | tenths of a second: 20 | rank that has waited, + 1: 20 | rank to blame: 20 |
inline constexpr std::uint64_t kField = (1u << 20) - 1;

PYCOMM_HD constexpr std::uint64_t abort_word(Reason reason, int rank) {
  return static_cast<std::uint64_t>(reason) << 60 | (static_cast<std::uint64_t>(rank) & kField);
}
PYCOMM_HD constexpr std::uint64_t timeout_word(int rank, int waiter, double seconds) {
  const double tenths = 10 * seconds;
  const auto most = static_cast<double>(kField);
  return abort_word(Reason::timeout, rank) | static_cast<std::uint64_t>(waiter + 1) << 20 |
         static_cast<std::uint64_t>(tenths < most ? tenths : most) << 40;
}
PYCOMM_HD constexpr Reason reason_of(std::uint64_t word) { return static_cast<Reason>(word >> 60); }
PYCOMM_HD constexpr int rank_of(std::uint64_t word) { return static_cast<int>(word & kField); }
// The rank whose wait has timed out; -1 if the word does not say.
PYCOMM_HD constexpr int waiter_of(std::uint64_t word) {
  return static_cast<int>(word >> 20 & kField) - 1;
}
PYCOMM_HD constexpr double seconds_of(std::uint64_t word) {
  return static_cast<double>(word >> 40 & kField) / 10;
}
// Whether a word that another process wrote gives a reason and names only ranks among so many.
PYCOMM_HD constexpr bool is_abort_word(std::uint64_t word, int ranks) {
  const Reason reason = reason_of(word);
  return reason > Reason::none && reason <= Reason::returned && rank_of(word) < ranks &&
         waiter_of(word) < ranks;
}

}  // namespace pycomm

// What a device tells its host of the times of operations: a ring in pinned host memory, which kernels
// write and never read. Each word is a store of its own, in no order with the others, because a fence
// would make the kernel wait until they are there. So a word carries the round of the ring in which it was
// written: if all of them are of one round, they are of one operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/operation.h"
#include "core/record.h"

namespace pycomm::cuda {

// The host may be this many operations behind: 20 ms or more, if each takes at least 5 us.
inline constexpr std::uint32_t kTimings = 4096;

// The words: when this rank had announced the operation, when all ranks had, and the end, all in
// nanoseconds of the device's clock; the operation's bytes; and its kind.
struct Timing {
  static constexpr std::size_t kWords = 5;
  std::uint64_t words[kWords];
};

inline constexpr int kTimingBits = 48;
inline constexpr std::uint64_t kTimingMask = (std::uint64_t{1} << kTimingBits) - 1;
inline constexpr std::uint64_t kTimingRounds = std::uint64_t{1} << (64 - kTimingBits);

// The round in which an operation is written. Operations are numbered from 0, rounds from 1, because memory
// begins with zeros.
PYCOMM_HD constexpr std::uint64_t timing_round(std::uint32_t number) {
  return (number / kTimings + 1) % kTimingRounds;
}
PYCOMM_HD constexpr std::uint64_t timing_word(std::uint32_t number, std::uint64_t value) {
  return timing_round(number) << kTimingBits | (value & kTimingMask);
}
PYCOMM_HD constexpr std::uint64_t kind_word(const Operation& operation) {
  return static_cast<std::uint64_t>(operation.collective) << 8 |
         static_cast<std::uint64_t>(operation.codec.kind);
}

// Reads a ring, in order. A reader that is too far behind misses what has been written over.
class TimingReader {
 public:
  // The next operation that the device has ended, if there is one.
  std::optional<TimedOperation> next(const Timing* ring) {
    for (;;) {
      const std::uint64_t wanted = timing_round(next_);
      std::uint64_t values[Timing::kWords], round = 0;
      bool whole = true;
      for (std::size_t i = 0; i < Timing::kWords; ++i) {
        const std::uint64_t word =
            __atomic_load_n(&ring[next_ % kTimings].words[i], __ATOMIC_RELAXED);
        round = word >> kTimingBits;
        whole = whole && round == wanted;
        values[i] = word & kTimingMask;
      }
      if (whole) {
        ++next_;
        return TimedOperation{static_cast<Collective>(values[4] >> 8 & 0xff),
                              static_cast<CodecKind>(values[4] & 0xff),
                              static_cast<std::int64_t>(values[3]), between(values[0], values[2]),
                              between(values[1], values[2])};
      }
      const std::uint64_t ahead = (round - wanted) % kTimingRounds;
      const bool is_older = ahead == kTimingRounds - 1;
      if (is_older || ahead == 0) return {};  // or only some of the words have come
      // It has been written over; the oldest one that is left may be a round behind this one.
      next_ += 1 + static_cast<std::uint32_t>(ahead - 1) * kTimings;
    }
  }

 private:
  // Modulo 2^48. A clock that has been set back gives 0, not days.
  static std::int64_t between(std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t time = (end - begin) & kTimingMask;
    return time > kTimingMask / 2 ? 0 : static_cast<std::int64_t>(time);
  }

  std::uint32_t next_ = 0;
};

}  // namespace pycomm::cuda

// What a device tells its host of the times of meetings: a ring in pinned host memory that kernels write
// and never read. Their stores cross the bus one by one, and a fence would cost a microsecond. So each word
// carries the round of the ring in which it was written: words of one round are one meeting's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/operation.h"
#include "core/record.h"

namespace pycomm::cuda {

// The host may be behind by as many meetings, of which the shortest ones take 20 ms.
inline constexpr std::uint32_t kTimings = 4096;

// One meeting of all ranks, as one of them has seen it. An operation has one, or several in a row.
struct Meeting {
  // Nanoseconds of the device's clock: when this rank had come, when all had, the end.
  std::uint64_t begun, arrived, done;
  std::uint64_t bytes;  // of the whole operation
  std::uint64_t kind;   // kind_word()
};

struct Timing {
  static constexpr std::size_t kWords = sizeof(Meeting) / sizeof(std::uint64_t);
  std::uint64_t words[kWords];
};

inline constexpr int kTimingBits = 48;
inline constexpr std::uint64_t kTimingMask = (std::uint64_t{1} << kTimingBits) - 1;
inline constexpr std::uint64_t kTimingRounds = std::uint64_t{1} << (64 - kTimingBits);

// The first round is 1, because memory begins with zeros.
PYCOMM_HD constexpr std::uint64_t timing_round(std::uint32_t sequence) {
  return (sequence / kTimings + 1) % kTimingRounds;
}
PYCOMM_HD constexpr std::uint64_t timing_word(std::uint32_t sequence, std::uint64_t value) {
  return timing_round(sequence) << kTimingBits | (value & kTimingMask);
}

// `last`: no other meeting of the operation follows.
PYCOMM_HD constexpr std::uint64_t kind_word(const Operation& operation, bool last) {
  return static_cast<std::uint64_t>(operation.collective) << 16 |
         static_cast<std::uint64_t>(operation.codec.kind) << 8 | (last ? 1u : 0u);
}

// Reads a ring, in order. A reader that is too far behind misses what has been written over.
class TimingReader {
 public:
  // The next operation that the device has ended, if there is one.
  std::optional<TimedOperation> next(const Timing* ring) {
    while (const std::optional<Meeting> meeting = next_meeting(ring)) {
      if (!first_) first_ = meeting;
      if ((meeting->kind & 1) == 0) continue;
      const Meeting first = *first_;
      first_.reset();
      return TimedOperation{static_cast<Collective>(meeting->kind >> 16 & 0xff),
                            static_cast<CodecKind>(meeting->kind >> 8 & 0xff),
                            static_cast<std::int64_t>(meeting->bytes),
                            between(first.begun, meeting->done),
                            between(first.arrived, meeting->done)};
    }
    return {};
  }

 private:
  static std::int64_t between(std::uint64_t begin, std::uint64_t end) {
    return static_cast<std::int64_t>((end - begin) & kTimingMask);
  }

  std::optional<Meeting> next_meeting(const Timing* ring) {
    for (;;) {
      const std::uint32_t sequence = next_sequence(sequence_);
      const std::uint64_t wanted = timing_round(sequence);
      std::uint64_t values[Timing::kWords], round = 0;
      bool whole = true;
      for (std::size_t i = 0; i < Timing::kWords; ++i) {
        const std::uint64_t word =
            __atomic_load_n(&ring[sequence % kTimings].words[i], __ATOMIC_RELAXED);
        round = word >> kTimingBits;
        whole = whole && round == wanted;
        values[i] = word & kTimingMask;
      }
      // The last word is the oldest one.
      const std::uint64_t ahead = (round - wanted) % kTimingRounds;
      const bool is_older = round == 0 || ahead == kTimingRounds - 1;
      if (!whole && (is_older || ahead == 0)) return {};
      sequence_ = sequence;
      if (whole) return Meeting{values[0], values[1], values[2], values[3], values[4]};
      // It has been written over; the oldest one that is left may be a round behind this one.
      sequence_ += static_cast<std::uint32_t>(ahead - 1) * kTimings;
      first_.reset();
    }
  }

  std::uint32_t sequence_ = 0;    // of the last meeting
  std::optional<Meeting> first_;  // of an operation that is not complete
};

}  // namespace pycomm::cuda

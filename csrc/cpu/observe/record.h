// The record of a rank's last operations: a ring of cache lines in its slice of the window. Only
// its rank writes it, with a few stores and at most two reads of a counter per operation. Other
// ranks and other processes may read it at any time, also when its rank hangs or has died.
//
// The time at which all ranks had come to an operation is not recorded: it is the latest of the
// times at which they entered the operation.
//
// What a rank launches on its device is recorded in a second ring, whose records end without a time:
// the device tells how far it is (core/signal.h).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <optional>

#include "core/layout.h"
#include "core/operation.h"
#include "cpu/observe/ticks.h"

namespace pycomm::cpu {

// Operations on fewer bytes take so little time that reading the clock again would be up to 5 % of
// it. They record when they have ended only if they have waited for long or are in a sample.
inline constexpr std::int64_t kTimedFrom = 64 << 10;
inline constexpr std::uint32_t kSampledOneIn = 16;
// Multiples of the golden ratio spread evenly, and follow no period of a program.
constexpr bool is_sampled(std::uint32_t number) {
  return number * 0x9e3779b9u < 0xffffffffu / kSampledOneIn;
}
// A launch that is captured begins only when its graph is replayed.
inline constexpr std::int64_t kNotDone = 0, kUntimed = 1, kCaptured = 2;

// Times are ticks.
struct RecordedTicks {
  Operation operation;
  std::uint32_t number;
  std::uint32_t subject;  // the number of a text (cpu/observe/subject.h), or 0
  std::int64_t entered;
  std::int64_t done;  // kNotDone, kUntimed, kCaptured, or when the operation had succeeded
};

class alignas(kLine) Record {
 public:
  // Returns the time. Every store is a release, so that a reader that sees one of them also sees
  // that the number is 0.
  std::int64_t enter(const Operation& operation, std::uint32_t number, std::uint32_t subject) {
    number_.store(0, std::memory_order_relaxed);
    const auto words = std::bit_cast<Words>(operation);
    for (std::size_t i = 0; i < words.size(); ++i) {
      operation_[i].store(words[i], std::memory_order_release);
    }
    subject_.store(subject, std::memory_order_release);
    const std::int64_t now = ticks();
    entered_.store(now, std::memory_order_release);
    done_.store(kNotDone, std::memory_order_release);
    number_.store(number, std::memory_order_release);
    return now;
  }
  // The operation has succeeded.
  void end(std::int64_t done) { done_.store(done, std::memory_order_release); }

  // Empty if there is no record, while it is being written, or if it is damaged.
  std::optional<RecordedTicks> read() const {
    const std::uint32_t number = number_.load(std::memory_order_acquire);
    Words words;
    for (std::size_t i = 0; i < words.size(); ++i) {
      words[i] = operation_[i].load(std::memory_order_acquire);
    }
    const RecordedTicks entry{
        std::bit_cast<Operation>(words), number, subject_.load(std::memory_order_acquire),
        entered_.load(std::memory_order_acquire), done_.load(std::memory_order_acquire)};
    const bool whole = number != 0 && number_.load(std::memory_order_relaxed) == number;
    if (!whole || !is_valid(entry.operation)) return {};
    return entry;
  }

 private:
  using Words = std::array<std::uint64_t, sizeof(Operation) / sizeof(std::uint64_t)>;

  std::atomic<std::uint64_t> operation_[std::tuple_size_v<Words>];
  std::atomic<std::int64_t> entered_, done_;
  std::atomic<std::uint32_t> number_, subject_;
};
static_assert(sizeof(Record) == kLine);

// The number of records in a ring, which divides 2^32.
inline constexpr std::uint32_t kRecords = 128;

}  // namespace pycomm::cpu

// What a rank notes of its operations: their records (cpu/observe/record.h), their number and times
// (cpu/observe/counters.h), and how long they have blocked its program. One thread at a time notes,
// which costs an operation at most 30 ns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/operation.h"
#include "cpu/memory/window.h"
#include "cpu/observe/counters.h"
#include "cpu/observe/record.h"
#include "cpu/observe/ticks.h"

namespace pycomm::cpu {

class Recorder {
 public:
  // `first_epoch`: the number before that of the first operation.
  Recorder(Record* records, Control& mine, std::uint32_t first_epoch)
      : records_(records), mine_(mine), recorded_(first_epoch) {}

  // Sets what the next operations are about: the number of one of this rank's subjects, or 0.
  void set_subject(std::uint32_t number) { subject_ = number; }
  std::uint32_t subject() const { return subject_; }

  // The next operation begins. Call enter() later, when no rank waits for this one any more.
  void begin() {
    waited_long_ = false;
    moments_.arrived = kNotDone;
  }
  // Only the first call of an operation has an effect.
  void enter(const Operation& operation, std::uint32_t number) {
    if (recorded_ == number) return;
    recorded_ = number;
    moments_.entered = record().enter(operation, number, subject_);
  }
  // This rank waits for more than about a microsecond.
  void wait_long() { waited_long_ = true; }
  // All ranks have come to the operation.
  void arrive() {
    if (moments_.arrived == kNotDone) {
      moments_.arrived = waited_long_ ? ticks() : moments_.entered;
    }
  }
  // The operation has succeeded.
  void end(const Operation& operation) {
    arrive();
    const std::int64_t bytes = operation.count * size_of(operation.dtype);
    const std::int64_t weight = this->weight(bytes);
    moments_.done = weight != 0 ? ticks() : kUntimed;
    record().end(moments_.done);
    if (operation.device != Device::cpu) return;  // the host has only agreed on it
    counters_.add(operation, bytes, weight, moments_);
  }

  // What the operations have taken so far. From any thread.
  const Counters& counters() const { return counters_; }
  // Counts a time, in ticks, in which a caller was blocked by operations of this group. Equal ticks
  // tell only that a caller was not blocked before. Time in which several threads are blocked
  // counts once. The second form is for the last operation.
  void count_blocked(std::int64_t begin, std::int64_t end) {
    if (end <= blocked_until_) return;
    const auto increase = [](std::atomic<std::int64_t>& sum, std::int64_t ticks) {
      sum.store(sum.load(std::memory_order_relaxed) + ticks, std::memory_order_relaxed);
    };
    begin = std::max(begin, blocked_until_);
    if (blocked_until_ != 0) increase(mine_.own, begin - blocked_until_);
    increase(mine_.blocked, end - begin);
    blocked_until_ = end;
  }
  void count_blocked() {
    count_blocked(moments_.entered, std::max(moments_.entered, moments_.done));
  }

 private:
  Record& record() const { return records_[recorded_ % kRecords]; }
  // The number of operations for which this operation's times count; 0 if it is not timed.
  std::int64_t weight(std::int64_t bytes) const {
    if (bytes >= kTimedFrom || waited_long_) return 1;
    return is_sampled(recorded_) ? kSampledOneIn : 0;
  }

  Record* const records_;  // this rank's
  Control& mine_;
  std::uint32_t recorded_;  // the last operation that has a record
  std::uint32_t subject_ = 0;
  bool waited_long_ = false;  // in this operation
  std::int64_t blocked_until_ = 0;
  Counters::Moments moments_{};
  Counters counters_;
};

}  // namespace pycomm::cpu

// A ring of frames in shared memory, with one writer and one reader, and the queue of answers that
// lies behind it. Everything that the other side writes is read once and checked.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/p2p/frame.h"

namespace pycomm::cpu::p2p {

// Copy bytes into or out of a ring, from a position that keeps counting beyond its end.
inline void put(std::byte* ring, std::uint64_t position, const void* from, std::int64_t bytes) {
  const auto at = static_cast<std::int64_t>(position % kRingBytes);
  const std::int64_t first = std::min(bytes, kRingBytes - at);
  std::memcpy(ring + at, from, static_cast<std::size_t>(first));
  std::memcpy(ring, static_cast<const std::byte*>(from) + first,
              static_cast<std::size_t>(bytes - first));
}
inline void get(const std::byte* ring, std::uint64_t position, void* to, std::int64_t bytes) {
  const auto at = static_cast<std::int64_t>(position % kRingBytes);
  const std::int64_t first = std::min(bytes, kRingBytes - at);
  std::memcpy(to, ring + at, static_cast<std::size_t>(first));
  std::memcpy(static_cast<std::byte*>(to) + first, ring, static_cast<std::size_t>(bytes - first));
}

// The difference of two counters. Throws if it is larger than `most`.
inline std::int64_t distance(std::uint64_t ahead, std::uint64_t behind, std::int64_t most) {
  const std::uint64_t apart = ahead - behind;
  PYCOMM_CHECK(apart <= static_cast<std::uint64_t>(most),
               "a ring's counter has an impossible value");
  return static_cast<std::int64_t>(apart);
}

// The sender's side. It owns the memory at `ring`, of kAllocationBytes.
class SenderEnd {
 public:
  SenderEnd(Mailbox& mailbox, std::byte* ring)
      : mailbox_(mailbox), ring_(ring), sent_(mailbox.sender.sent.load()), published_(sent_) {}

  // Bytes that frames may still take.
  std::int64_t room() const {
    const std::uint64_t taken = mailbox_.receiver.taken.load(std::memory_order_acquire);
    return kRingBytes - distance(sent_, taken, kRingBytes);
  }
  // Writes a frame for which there is room.
  void write(const Frame& frame, const void* payload = nullptr) {
    put(ring_, sent_, &frame, sizeof(frame));
    if (payload != nullptr) put(ring_, sent_ + sizeof(frame), payload, payload_of(frame));
    sent_ += static_cast<std::uint64_t>(length_of(frame));
  }
  // Shows the written frames to the receiver; true if there are any. Sequentially consistent, so
  // that the caller sees a receiver that has fallen asleep.
  bool publish() {
    if (published_ == sent_) return false;
    mailbox_.sender.sent.exchange(sent_);
    published_ = sent_;
    return true;
  }
  // Takes the next answer, if there is one.
  bool next(Answer& answer) {
    const std::uint64_t answered = mailbox_.receiver.answered.load(std::memory_order_acquire);
    const std::uint64_t taken = mailbox_.sender.answers_taken.load(std::memory_order_relaxed);
    if (distance(answered, taken, kAnswers) == 0) return false;
    std::memcpy(&answer, ring_ + kRingBytes + (taken % kAnswers) * sizeof(Answer), sizeof(Answer));
    mailbox_.sender.answers_taken.store(taken + 1, std::memory_order_release);
    return true;
  }

 private:
  Mailbox& mailbox_;
  std::byte* const ring_;
  std::uint64_t sent_;
  std::uint64_t published_;
};

// The receiver's side. `heap` is the sender's.
class ReceiverEnd {
 public:
  ReceiverEnd(Mailbox& mailbox, std::byte* ring, std::uint32_t context, const Range& heap)
      : mailbox_(mailbox),
        ring_(ring),
        context_(context),
        heap_(heap),
        taken_(mailbox.receiver.taken.load()) {}

  // Reads and checks the header of the next frame, if there is one.
  bool next(Frame& frame) {
    const std::uint64_t sent = mailbox_.sender.sent.load(std::memory_order_acquire);
    if (sent == taken_) return false;
    const std::int64_t available = distance(sent, taken_, kRingBytes);
    PYCOMM_CHECK(available >= static_cast<std::int64_t>(sizeof(Frame)), "a frame is cut off");
    get(ring_, taken_, &frame, sizeof(frame));
    check_frame(frame, context_, available, heap_);
    return true;
  }
  void read_payload(const Frame& frame, void* to) const {
    if (to != nullptr) get(ring_, taken_ + sizeof(frame), to, payload_of(frame));
  }
  // Gives the frame's room back to the sender.
  void release(const Frame& frame) {
    taken_ += static_cast<std::uint64_t>(length_of(frame));
    mailbox_.receiver.taken.exchange(taken_);  // as in SenderEnd::publish()
  }
  // Returns false if the queue is full.
  bool answer(const Answer& answer) {
    const std::uint64_t answered = mailbox_.receiver.answered.load(std::memory_order_relaxed);
    const std::uint64_t taken = mailbox_.sender.answers_taken.load(std::memory_order_acquire);
    if (distance(answered, taken, kAnswers) == kAnswers) return false;
    std::memcpy(ring_ + kRingBytes + (answered % kAnswers) * sizeof(Answer), &answer,
                sizeof(Answer));
    mailbox_.receiver.answered.exchange(answered + 1);
    return true;
  }

 private:
  Mailbox& mailbox_;
  std::byte* const ring_;
  const std::uint32_t context_;
  const Range heap_;
  std::uint64_t taken_;
};

}  // namespace pycomm::cpu::p2p

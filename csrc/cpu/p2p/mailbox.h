// The part of the window that a pair of ranks uses to send messages in one direction. It only has
// counters; the messages lie in a ring in the sender's heap, which the sender allocates before its
// first message.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/elements.h"

namespace pycomm::cpu::p2p {

// Zero-initialised. Each line has one writer. Counters only grow: frames are counted in bytes,
// answers in entries.
struct Mailbox {
  struct alignas(128) Sender {
    std::atomic<std::int64_t> ring;  // its offset in the sender's heap; 0 before the first message
    std::atomic<std::uint64_t> sent;
    std::atomic<std::uint64_t> answers_taken;
  } sender;
  struct alignas(128) Receiver {
    std::atomic<std::uint64_t> taken;
    std::atomic<std::uint64_t> answered;
  } receiver;
};

// A pair of messages that do not match. The receiver writes it before it aborts the group, so that
// every rank can name both sides. The abort word names the sender and the receiver.
struct Disagreement {
  std::int64_t sent_bytes, received_bytes;
  std::int32_t tag;
  Element sent, received;
};

// "rank 0 sent 4 float32, rank 1 receives 8 float32". Reads each value once.
std::string describe(const Disagreement& disagreement, int sender, int receiver);

// Bytes of a ring of frames, and the entries of the queue of answers that follows it.
inline constexpr std::int64_t kRingBytes = 512 << 10;
inline constexpr std::int64_t kAnswers = 256;

}  // namespace pycomm::cpu::p2p

// What ranks write to each other to move messages: frames, from a message's sender to its receiver,
// and answers, which go back. On one node they lie in shared memory (cpu/p2p/ring.h), between nodes
// they are streams of bytes (cpu/p2p/stream.h).
//
// Parsers trust no byte. They throw std::invalid_argument that says what is wrong.
#pragma once

#include <string>

#include "core/layout.h"
#include "core/operation.h"
#include "cpu/p2p/mailbox.h"

namespace pycomm::cpu::p2p {

// Messages of at most this size are sent at once. The sender of a longer one announces it and waits
// until the receiver accepts it.
inline constexpr std::int64_t kEagerBytes = 16 << 10;
// The most payload of a frame with a part of a message.
inline constexpr std::int64_t kDataBytes = 64 << 10;
inline constexpr std::int64_t kMostBytes = std::int64_t{1} << 60;

// True if a value, possibly from another process, is the type of a message's elements.
constexpr bool is_element(Element element) { return is_known(element) && element != Element::same; }

// The messages of a program, and those of which collectives consist. They never match each other.
enum class Channel : std::uint8_t { program, collective };

enum class FrameKind : std::uint8_t {
  eager,     // a message, with its bytes
  announce,  // a message; its bytes follow when the receiver has accepted it
  data,      // the next bytes of an accepted message
  written,   // the sender has written an accepted message where the receiver wants it
  piece,  // the next bytes of an accepted message, which lie in the window of the sender's device
  left    // between nodes: the sender leaves the group, this is its last frame
};

// Begins a frame. The payload of eager messages and of data follows; it is padded to whole lines.
struct alignas(kLine) Frame {
  std::uint32_t context;  // Window::id; between nodes kStreamContext
  FrameKind kind;
  Element element;
  std::int32_t tag;
  std::uint64_t message;  // the number of the message from this sender to this receiver
  std::int64_t bytes;     // of the message; for data and pieces, of these
  std::int64_t offset;    // announced: the place of the bytes in the sender's heap; a piece's place
  Channel channel = Channel::program;
};
static_assert(sizeof(Frame) == kLine);

constexpr std::int64_t payload_of(const Frame& frame) {
  return frame.kind == FrameKind::eager || frame.kind == FrameKind::data ? frame.bytes : 0;
}
constexpr std::int64_t length_of(const Frame& frame) {
  return static_cast<std::int64_t>(sizeof(Frame)) + round_up(payload_of(frame), kLine);
}

// Checks that a tensor of another rank lies in that rank's heap or in no window.
inline void check_place(std::int64_t offset, std::int64_t bytes, const Range& heap) {
  const std::int64_t end = heap.begin + heap.count;
  PYCOMM_CHECK(
      offset == kNotInWindow || (offset >= heap.begin && offset <= end && bytes <= end - offset),
      "an announced tensor lies outside the heap");
}

// Checks a frame that was read from a ring with `available` bytes of frames. `heap` is the sender's.
inline void check_frame(const Frame& frame, std::uint32_t context, std::int64_t available,
                        const Range& heap) {
  PYCOMM_CHECK(frame.context == context, "a frame is from another group");
  PYCOMM_CHECK(frame.kind <= FrameKind::piece && is_element(frame.element),
               "a frame has an unknown kind or dtype");
  PYCOMM_CHECK(frame.channel <= Channel::collective, "a frame is on no channel");
  PYCOMM_CHECK(frame.bytes >= 0 && frame.bytes <= kMostBytes, "a message has an impossible size");
  if (frame.kind == FrameKind::eager || frame.kind == FrameKind::data) {
    const std::int64_t most = frame.kind == FrameKind::eager ? kEagerBytes : kDataBytes;
    PYCOMM_CHECK(frame.bytes <= most, "a frame is too long");
  }
  PYCOMM_CHECK(length_of(frame) <= available, "a frame is longer than the bytes that were sent");
  if (frame.kind == FrameKind::announce) check_place(frame.offset, frame.bytes, heap);
}

// Between nodes, an introduction says once who sends (core/message.h).
inline constexpr std::uint32_t kStreamContext = 0;
// The most payload of a frame with a part of a message, between nodes.
inline constexpr std::int64_t kStreamedBytes = 1 << 20;

// Checks a frame that has arrived from another node.
inline void check_streamed_frame(const Frame& frame) {
  const bool data = frame.kind == FrameKind::data;
  PYCOMM_CHECK(frame.context == kStreamContext,
               "a frame has another context than frames between nodes");
  PYCOMM_CHECK(
      (frame.kind <= FrameKind::data || frame.kind == FrameKind::left) && is_element(frame.element),
      "a frame has an unknown kind or dtype");
  PYCOMM_CHECK(frame.channel <= Channel::collective, "a frame is on no channel");
  PYCOMM_CHECK(frame.bytes >= (data ? 1 : 0) && frame.bytes <= kMostBytes,
               "a message has an impossible size");
  PYCOMM_CHECK(payload_of(frame) <= (data ? kStreamedBytes : kEagerBytes), "a frame is too long");
}

enum class AnswerKind : std::uint32_t {
  accept,  // the receiver has a place for the message
  taken,   // the receiver has read the message, or a piece of it, where it lies
  left     // between nodes: the receiver leaves the group, this is its last answer
};

struct Answer {
  std::uint64_t message;
  std::int64_t offset;  // accepted: the place for the bytes in the receiver's heap; a piece's place
  std::uint32_t context;
  AnswerKind kind;
};
static_assert(sizeof(Answer) == 24);

inline constexpr std::int64_t kAllocationBytes =
    kRingBytes + kAnswers * static_cast<std::int64_t>(sizeof(Answer));

}  // namespace pycomm::cpu::p2p

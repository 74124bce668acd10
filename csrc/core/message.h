// The messages between ranks, apart from data. Ranks of one node exchange them in shared memory:
// announcements, and what a rank is waiting for. Between nodes there are three messages: a handshake
// before every operation, a farewell, which is the last message on a link, and the introduction of a
// rank that connects to another one to send it tensors (cpu/p2p/stream.h). All begin with a header
// that shows that they come from the node at the other end (docs/reference/wire-format.md).
//
// Parsers trust no byte. They throw std::invalid_argument that says what is wrong; what they return
// is safe to use as an index into tables and memory.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "core/operation.h"
#include "core/signal.h"

namespace pycomm {

inline constexpr std::uint32_t kMessageMagic = 0x4b4c4350;  // "PCLK" in memory
inline constexpr std::uint16_t kMessageVersion = 6;

enum class MessageKind : std::uint16_t { handshake = 1, farewell = 2, introduction = 3 };

// Random bytes that only processes with access to the group's Store know.
using Secret = std::array<std::byte, 16>;

// The sender of a message on a link.
struct Sender {
  Secret secret;
  int node;
};

struct MessageHeader {
  std::uint32_t magic;
  std::uint16_t version;
  MessageKind kind;
  std::int64_t node;  // of the sender
  Secret secret;
};
static_assert(sizeof(MessageHeader) == 32);

inline MessageHeader header_of(MessageKind kind, const Sender& sender) {
  return {kMessageMagic, kMessageVersion, kind, sender.node, sender.secret};
}

struct Handshake {
  MessageHeader header;
  Operation operation;
  std::uint32_t sequence;
  Preflight preflight;
};
static_assert(sizeof(Handshake) == 80);

struct Farewell {
  MessageHeader header;
  std::uint64_t abort_word;  // 0: the node leaves without an error
};
static_assert(sizeof(Farewell) == 40);

struct Introduction {
  MessageHeader header;  // with the secret of the rank that it is for
  std::int64_t rank;     // the sender
};
static_assert(sizeof(Introduction) == 40);

// Parses a message and checks that it is of this kind and from this sender.
template <class Message>
Message parse_message(std::span<const std::byte> bytes, MessageKind kind, const Sender& sender) {
  static_assert(std::is_trivially_copyable_v<Message>);
  PYCOMM_CHECK(bytes.size() == sizeof(Message), "a message has " + std::to_string(bytes.size()) +
                                                    " bytes instead of " +
                                                    std::to_string(sizeof(Message)));
  Message message;
  std::memcpy(&message, bytes.data(), sizeof(message));
  const MessageHeader& header = message.header;
  PYCOMM_CHECK(header.magic == kMessageMagic, "a message is not a pycomm message");
  PYCOMM_CHECK(header.version == kMessageVersion,
               "a message must have version " + std::to_string(kMessageVersion) +
                   " of the format, got " + std::to_string(header.version));
  PYCOMM_CHECK(header.secret == sender.secret, "a message lacks the group's secret");
  PYCOMM_CHECK(header.kind == kind && header.node == sender.node,
               "a message has an unexpected kind, or is from an unexpected node");
  return message;
}

inline Handshake parse_handshake(std::span<const std::byte> bytes, const Sender& sender) {
  const auto handshake = parse_message<Handshake>(bytes, MessageKind::handshake, sender);
  PYCOMM_CHECK(is_valid(handshake.operation),
               "a handshake announces an operation that does not exist");
  return handshake;
}

// `world` is the number of ranks, one of which an abort word may blame.
inline Farewell parse_farewell(std::span<const std::byte> bytes, const Sender& sender, int world) {
  const auto farewell = parse_message<Farewell>(bytes, MessageKind::farewell, sender);
  PYCOMM_CHECK(farewell.abort_word == 0 || is_abort_word(farewell.abort_word, world),
               "a farewell blames a rank that is not in the group");
  return farewell;
}

// `node_of` returns the node of a rank below `world`.
template <class NodeOf>
Introduction parse_introduction(std::span<const std::byte> bytes, const Secret& secret, int world,
                                NodeOf node_of) {
  Introduction introduction;
  PYCOMM_CHECK(bytes.size() == sizeof(introduction),
               "an introduction has " + std::to_string(bytes.size()) + " bytes instead of " +
                   std::to_string(sizeof(introduction)));
  std::memcpy(&introduction, bytes.data(), sizeof(introduction));
  PYCOMM_CHECK(introduction.rank >= 0 && introduction.rank < world,
               "an introduction names a rank that is not in the group");
  const int node = node_of(static_cast<int>(introduction.rank));
  return parse_message<Introduction>(bytes, MessageKind::introduction, {secret, node});
}

// Parses an announcement of rank `rank` in a group of `ranks`. Throws std::invalid_argument unless
// the operation is valid and its tensors lie in that rank's heap or in no window.
inline Announcement parse_announcement(std::span<const std::byte> bytes, int ranks, int rank,
                                       std::int64_t heap_begin, std::int64_t heap_end) {
  Announcement announced;
  PYCOMM_CHECK(bytes.size() == sizeof(announced),
               "an announcement has " + std::to_string(bytes.size()) + " bytes instead of " +
                   std::to_string(sizeof(announced)));
  std::memcpy(&announced, bytes.data(), sizeof(announced));
  const Operation& operation = announced.operation;
  PYCOMM_CHECK(is_valid(operation), "an announced operation does not exist");
  const bool lists = operation.codec.kind == CodecKind::topk;
  const auto fits = [&](std::int64_t offset, std::int64_t size) {
    return offset == kNotInWindow ||
           (offset >= heap_begin && offset <= heap_end && size <= heap_end - offset);
  };
  PYCOMM_CHECK(fits(announced.input, lists ? 0 : input_bytes(operation, ranks, rank)) &&
                   fits(announced.output, lists ? 0 : output_bytes(operation, ranks, rank)),
               "an announced tensor lies outside the heap");
  return announced;
}

// What a rank is waiting for, as other ranks see it: one word, which is 0 while the rank waits for
// nothing. Besides channels there are two things to wait for: announcements and packets.
inline constexpr int kAnnouncement = kChannels;
inline constexpr int kPacket = kChannels + 1;

struct Waiting {
  int rank;
  int channel;
  std::uint32_t target;
};

constexpr std::uint64_t waiting_word(const Waiting& waiting) {
  return static_cast<std::uint64_t>(waiting.rank + 1) << 40 |
         static_cast<std::uint64_t>(waiting.channel) << 32 | waiting.target;
}
// Returns nothing if the word does not name one of `ranks` ranks.
constexpr std::optional<Waiting> parse_waiting(std::uint64_t word, int ranks) {
  const std::uint64_t rank = word >> 40, channel = word >> 32 & 0xff;
  if (rank == 0 || rank > static_cast<std::uint64_t>(ranks) || channel > kPacket) return {};
  return Waiting{static_cast<int>(rank) - 1, static_cast<int>(channel),
                 static_cast<std::uint32_t>(word)};
}

}  // namespace pycomm

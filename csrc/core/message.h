// What ranks of different machines tell each other besides data: a greeting before every operation,
// and a farewell, which is the last message on a link. docs/wire-format.md.
//
// Both begin with a header that shows that the message comes from the machine at the other end of the
// link. Readers trust nothing: they throw std::invalid_argument with what is wrong, and what they
// return may index tables.
#pragma once

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "core/operation.h"
#include "core/signal.h"

namespace pycomm {

inline constexpr std::uint32_t kMessageMagic = 0x4b4c4350;  // "PCLK" in memory
inline constexpr std::uint16_t kMessageVersion = 1;

enum class MessageKind : std::uint16_t { greeting = 1, farewell = 2 };

// Random bytes, known to those who can read the group's Store.
using Secret = std::array<std::byte, 16>;

// Who sends a message on this link.
struct Sender {
  Secret secret;
  int machine;
};

struct MessageHeader {
  std::uint32_t magic;
  std::uint16_t version;
  MessageKind kind;
  std::int64_t machine;  // the sender
  Secret secret;
};
static_assert(sizeof(MessageHeader) == 32);

inline MessageHeader header_of(MessageKind kind, const Sender& sender) {
  return {kMessageMagic, kMessageVersion, kind, sender.machine, sender.secret};
}

struct Greeting {
  MessageHeader header;
  Operation operation;
  std::uint32_t sequence;
  Outlook outlook;
};
static_assert(sizeof(Greeting) == 80);

struct Farewell {
  MessageHeader header;
  std::uint64_t abort_word;  // 0: the machine leaves
};
static_assert(sizeof(Farewell) == 40);

// The message in `bytes` if it is one of this kind from this sender.
template <class Message>
Message parse_message(std::span<const std::byte> bytes, MessageKind kind, const Sender& sender) {
  static_assert(std::is_trivially_copyable_v<Message>);
  PYCOMM_CHECK(bytes.size() == sizeof(Message), "a message has " + std::to_string(bytes.size()) +
                                                    " bytes instead of " +
                                                    std::to_string(sizeof(Message)));
  Message message;
  std::memcpy(&message, bytes.data(), sizeof(message));
  const MessageHeader& header = message.header;
  PYCOMM_CHECK(header.magic == kMessageMagic, "a message is not one of pycomm's");
  PYCOMM_CHECK(header.version == kMessageVersion,
               "a message has version " + std::to_string(header.version) +
                   " of the format, known is " + std::to_string(kMessageVersion));
  PYCOMM_CHECK(header.secret == sender.secret, "a message lacks the group's secret");
  PYCOMM_CHECK(header.kind == kind && header.machine == sender.machine,
               "a message is of another kind, or from another machine");
  return message;
}

inline Greeting parse_greeting(std::span<const std::byte> bytes, const Sender& sender) {
  const auto greeting = parse_message<Greeting>(bytes, MessageKind::greeting, sender);
  PYCOMM_CHECK(is_valid(greeting.operation),
               "a greeting announces an operation that does not exist");
  return greeting;
}

// `world`: how many ranks an abort word may blame.
inline Farewell parse_farewell(std::span<const std::byte> bytes, const Sender& sender, int world) {
  const auto farewell = parse_message<Farewell>(bytes, MessageKind::farewell, sender);
  PYCOMM_CHECK(farewell.abort_word == 0 || is_abort_word(farewell.abort_word, world),
               "a farewell blames no rank of the group");
  return farewell;
}

}  // namespace pycomm

// Matches messages with receives by channel, source and tag. A message of a collective also has the
// size that the receive wants; if ranks disagree on the size, the collective itself finds that out.
//
// A message matches the receive that was posted first among those that fit it, and a receive
// matches the message that arrived first. So messages of one source and tag match in order.
#pragma once

#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cpu/p2p/request.h"

namespace pycomm::cpu::p2p {

// A message that has arrived before its receive.
struct Arrival {
  int source;  // by its number in the whole group, as everywhere here
  Frame frame;
  std::vector<std::byte> payload;  // of an eager message
};

class Matcher {
 public:
  // Takes the first posted receive that fits a message of this frame; null if there is none.
  RequestPtr take_receive(int source, const Frame& frame);
  // Takes the first message that fits a receive.
  std::optional<Arrival> take_arrival(const Envelope& wanted);
  // Keeps a receive or an arrival that has found no match.
  void keep(RequestPtr receive);
  void keep(Arrival arrival);
  // Forgets a posted receive. False if it is none, or has matched a message.
  bool forget(const RequestPtr& receive);
  // Forgets all receives and arrivals.
  void clear() { tags_.clear(); }

 private:
  struct Tag {
    std::list<RequestPtr> receives;
    std::list<Arrival> arrivals;
  };
  using Key = std::uint64_t;  // channel and tag
  using Tags = std::unordered_map<Key, Tag>;
  static Key key(Channel channel, std::int32_t tag) {
    return std::uint64_t{static_cast<std::uint8_t>(channel)} << 32 |
           static_cast<std::uint32_t>(tag);
  }
  static bool fits(const Envelope& wanted, int wanted_source, int source, const Frame& frame) {
    return (wanted_source == source || wanted_source == kAnySource) &&
           (frame.channel == Channel::program || wanted.bytes == frame.bytes);
  }
  void erase_if_empty(Tags::iterator tag) {
    if (tag->second.receives.empty() && tag->second.arrivals.empty()) tags_.erase(tag);
  }

  Tags tags_;
};

}  // namespace pycomm::cpu::p2p

// Matches messages with receives by source and tag.
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
  // Takes the first posted receive that fits; null if there is none.
  RequestPtr take_receive(int source, std::int32_t tag);
  // Takes the first message that fits a receive from `source`, which may be kAnySource.
  std::optional<Arrival> take_arrival(int source, std::int32_t tag);
  // For what has found no match.
  void keep(RequestPtr receive);
  void keep(Arrival arrival);
  // Forgets all receives and arrivals.
  void clear() { tags_.clear(); }

 private:
  struct Tag {
    std::list<RequestPtr> receives;
    std::list<Arrival> arrivals;
  };
  using Tags = std::unordered_map<std::int32_t, Tag>;
  void erase_if_empty(Tags::iterator tag) {
    if (tag->second.receives.empty() && tag->second.arrivals.empty()) tags_.erase(tag);
  }

  Tags tags_;
};

}  // namespace pycomm::cpu::p2p

#include "cpu/p2p/matcher.h"

#include <algorithm>
#include <utility>

namespace pycomm::cpu::p2p {

RequestPtr Matcher::take_receive(int source, const Frame& frame) {
  const auto known = tags_.find(key(frame.channel, frame.tag));
  if (known == tags_.end()) return nullptr;
  auto& receives = known->second.receives;
  const auto found = std::find_if(receives.begin(), receives.end(), [&](const RequestPtr& r) {
    return fits(r->envelope, r->peer, source, frame);
  });
  if (found == receives.end()) return nullptr;
  RequestPtr receive = std::move(*found);
  receives.erase(found);
  erase_if_empty(known);
  return receive;
}

std::optional<Arrival> Matcher::take_arrival(const Envelope& wanted) {
  const auto known = tags_.find(key(wanted.channel, wanted.tag));
  if (known == tags_.end()) return {};
  auto& arrivals = known->second.arrivals;
  const auto found = std::find_if(arrivals.begin(), arrivals.end(), [&](const Arrival& arrival) {
    return fits(wanted, wanted.peer, arrival.source, arrival.frame);
  });
  if (found == arrivals.end()) return {};
  std::optional<Arrival> arrival = std::move(*found);
  arrivals.erase(found);
  erase_if_empty(known);
  return arrival;
}

bool Matcher::forget(const RequestPtr& receive) {
  const auto known = tags_.find(key(receive->envelope.channel, receive->envelope.tag));
  if (known == tags_.end()) return false;
  const bool found = known->second.receives.remove(receive) > 0;
  erase_if_empty(known);
  return found;
}

void Matcher::keep(RequestPtr receive) {
  tags_[key(receive->envelope.channel, receive->envelope.tag)].receives.push_back(
      std::move(receive));
}

void Matcher::keep(Arrival arrival) {
  tags_[key(arrival.frame.channel, arrival.frame.tag)].arrivals.push_back(std::move(arrival));
}

}  // namespace pycomm::cpu::p2p

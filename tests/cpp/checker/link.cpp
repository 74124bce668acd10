#include "checker/link.h"

#include "checker/fibers.h"

namespace pycomm::checker {

std::int64_t Link::post(const Round& round) {
  Thread& carrier = this->carrier(++posted_);
  if (posted_ - waited_ > static_cast<std::int64_t>(carriers_.size())) {
    throw Violation("more rounds are under way than there may be");
  }
  carrier.clock.join(owner_.release());
  carrier.begin("round " + std::to_string(posted_));
  for (const Parcel& parcel : round.sends) {
    Pieces pieces = network_.memory.read(carrier, parcel.data, parcel.units, unit_);
    network_.line(node_, parcel.node).push_back({std::move(pieces), carrier.clock});
  }
  under_way_.push_back(round);
  return posted_;
}

void Link::wait(std::int64_t number) {
  for (; waited_ < number; ++waited_) {
    Thread& carrier = this->carrier(waited_ + 1);
    for (const Parcel& parcel : under_way_.front().receives) {
      auto& line = network_.line(parcel.node, node_);
      network_.fibers.wait_until([&] { return !line.empty(); },
                                 [&] { return owner_.when(owner_.now()) + " waits for a parcel"; });
      const Network::Message message = std::move(line.front());
      line.pop_front();
      std::int64_t units = 0;
      for (const Piece& piece : message.pieces) units += piece.units;
      if (units != parcel.units) throw Violation("a parcel has another length than its place");
      carrier.clock.join(message.clock);
      network_.memory.write(carrier, parcel.data, message.pieces, unit_);
    }
    under_way_.pop_front();
    owner_.clock.join(carrier.release());
  }
}

}  // namespace pycomm::checker

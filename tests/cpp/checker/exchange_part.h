// What one rank does between nodes: two-shot with buffers for every tile that is under way, as
// cpu/parts.h has them for encoded blocks.
#pragma once

#include "checker/comm.h"
#include "checker/link.h"

namespace pycomm::checker {

class ExchangePart {
 public:
  static constexpr std::int64_t kTileElements = 8192;
  // Of the buffers that the rank brings.
  static constexpr std::int64_t buffer_elements(int nodes) {
    return kTilesUnderWay * 3 * nodes * kTileElements;
  }

  // `owned`: by each node, of the output.
  ExchangePart(Comm& comm, Link& link, std::byte* buffers, std::vector<Range> owned)
      : comm_(comm), link_(link), buffers_(buffers), owned_(std::move(owned)) {
    link_.begin(comm_.unit());
  }

  std::int64_t tiles() const {
    std::int64_t most = 0;
    for (const Range& owned : owned_) most = std::max(most, owned.count);
    return ceil_div(most, kTileElements);
  }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return true; }

  void stage(std::int64_t t) {
    for (int m = 0; m < link_.size(); ++m) {
      comm_.copy(buffer(t, Use::contribution, m), tensor(t, m), piece(t, m).count);
    }
  }
  Round staged(std::int64_t t) const {
    Round round;
    for (int m = 0; m < link_.size(); ++m) {
      if (m == link_.rank()) continue;
      add(round.sends, m, buffer(t, Use::contribution, m), piece(t, m));
      add(round.receives, m, buffer(t, Use::incoming, m), piece(t, link_.rank()));
    }
    return round;
  }
  void reduce(std::int64_t t) {
    const int me = link_.rank();
    const auto from = [&](int m) {
      return buffer(t, m == me ? Use::contribution : Use::incoming, m);
    };
    const auto to = [&](int i) {
      return i == 0 ? buffer(t, Use::contribution, me) : tensor(t, me);
    };
    comm_.reduce(2, to, link_.size(), from, piece(t, me).count, true);
  }
  Round reduced(std::int64_t t) const {
    Round round;
    const int me = link_.rank();
    for (int m = 0; m < link_.size(); ++m) {
      if (m == me) continue;
      add(round.sends, m, buffer(t, Use::contribution, me), piece(t, me));
      add(round.receives, m, buffer(t, Use::result, m), piece(t, m));
    }
    return round;
  }
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t t) {
    for (int m = 0; m < link_.size(); ++m) {
      if (m == link_.rank()) continue;
      comm_.copy(tensor(t, m), buffer(t, Use::result, m), piece(t, m).count);
    }
  }

 private:
  enum class Use { contribution, incoming, result };

  Range piece(std::int64_t t, int node) const {
    const Range& owned = owned_[static_cast<std::size_t>(node)];
    const Tiles tiles{owned.count, kTileElements};
    if (t >= tiles.count()) return {owned.begin, 0};
    return {owned.begin + tiles[t].begin, tiles[t].count};
  }
  Place tensor(std::int64_t t, int node) const {
    return comm_.at(comm_.output(), piece(t, node).begin);
  }
  Place buffer(std::int64_t t, Use use, int node) const {
    const std::int64_t index =
        (t % kTilesUnderWay * 3 + static_cast<int>(use)) * link_.size() + node;
    return comm_.at({buffers_, comm_.rank()}, index * kTileElements);
  }
  static void add(std::vector<Parcel>& parcels, int node, const Place& place, const Range& range) {
    if (range.count > 0) parcels.push_back({node, place.data, range.count});
  }

  Comm& comm_;
  Link& link_;
  std::byte* const buffers_;
  const std::vector<Range> owned_;
};

}  // namespace pycomm::checker

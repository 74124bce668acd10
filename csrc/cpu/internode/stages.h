// The stages of an exchange (core/algorithms/internode.h) on one link: for plain tensors, for
// encoded blocks, and for top-k lists. Also the blocks of small plain tensors among many nodes
// (core/algorithms/dissemination.h).
#pragma once

#include <algorithm>

#include "core/algorithms/dissemination.h"
#include "core/algorithms/internode.h"
#include "core/algorithms/stripes.h"
#include "cpu/codecs/coded_comm.h"
#include "cpu/codecs/topk_comm.h"
#include "cpu/internode/link.h"

namespace pycomm::cpu {

// A transfer is an eighth of what a node owns, so that tiles overlap, but at least 32 KiB. All
// transfers of a tile together are at most 1 MiB, unless that minimum requires more.
inline constexpr std::int64_t kTiles = 8, kLeastTransferBytes = 32 << 10, kMostTileBytes = 1 << 20;

constexpr std::int64_t most_transfer_bytes(int nodes) {
  return std::max(kMostTileBytes / nodes / kLine * kLine, kLeastTransferBytes);
}
constexpr std::int64_t transfer_bytes(std::int64_t owned_bytes, int nodes) {
  return std::clamp(round_up(ceil_div(owned_bytes, kTiles), kLine), kLeastTransferBytes,
                    most_transfer_bytes(nodes));
}

// The range of a tensor that each node owns, cut into tiles.
struct OwnedRanges {
  std::vector<Range> owned;
  std::int64_t tile;  // elements

  static std::int64_t longest(const std::vector<Range>& owned);
  std::int64_t tiles() const { return ceil_div(longest(owned), tile); }
  // What a node owns of tile t.
  Range piece(std::int64_t t, int node) const;
};

inline constexpr int kAllNodes = -1;

// A plain tensor, sent from its memory and received in place.
class PlainStages {
 public:
  // `owned` is the range of `data` that each node owns. `reduces`: owned elements become the sums
  // of all nodes' contributions, which each node has at the same place in its `data`. `gathers`:
  // all nodes receive the owned elements, in place, or only node `to`. Tiles overlap only if they
  // are reduced. Otherwise transfers are as large as possible, because each costs a wake-up.
  struct Work {
    std::byte* data;
    std::vector<Range> owned;
    bool reduces;
    bool gathers;
    int to = kAllNodes;
  };

  PlainStages(Link& link, const Operation& operation, Work work, Scratch& scratch);

  std::int64_t tiles() const { return ranges_.tiles(); }
  bool reduces() const { return work_.reduces; }
  bool gathers() const { return work_.gathers; }
  void stage(std::int64_t) {}
  Batch staged(std::int64_t t) const;
  void reduce(std::int64_t t);
  Batch reduced(std::int64_t t) const;
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t) {}

 private:
  Range piece(std::int64_t t, int node) const { return ranges_.piece(t, node); }
  bool gets_result(int node) const { return work_.to == kAllNodes || work_.to == node; }
  Transfer transfer(int to, std::byte* data, const Range& range) const {
    return {to, data, range.count * element_size_};
  }
  std::byte* at(const Range& range) const { return work_.data + range.begin * element_size_; }
  std::byte* incoming(std::int64_t t, int node) const {
    return incoming_ + (t % kTilesUnderWay * link_.size() + node) * transfer_bytes_;
  }

  Link& link_;
  Work work_;
  const std::int64_t element_size_;
  const std::int64_t transfer_bytes_;
  const OwnedRanges ranges_;
  const ReduceLoop loop_;
  std::byte* incoming_;
  std::vector<const void*> sources_;
};

// A small plain stripe and the handshakes of all nodes, which travel in rounds. A block has a node's
// handshake and then its contribution.
class WholeStripes {
 public:
  // `stripe` has so many elements of this node's contribution, and gets the sums.
  WholeStripes(Link& link, const Operation& operation, std::byte* stripe, std::int64_t count,
               Scratch& scratch);

  Batch transfers(int held) const;
  // Compares the handshakes and adds the contributions, in node order.
  void reduce();

 private:
  // Block i is that of node rank + i.
  std::byte* block(int i) const { return blocks_ + i * (Link::kHandshakeBytes + bytes_); }
  std::byte* contribution(int i) const { return block(i) + Link::kHandshakeBytes; }

  Link& link_;
  std::byte* const stripe_;
  const std::int64_t count_, element_size_, bytes_;
  const ReduceLoop loop_;
  std::byte* const blocks_;
};

// The tiles of an exchange. For block codecs, a tile has as many periods as make a transfer
// worthwhile. For top-k, which selects from the whole tensor, one tile has all periods.
TileRanges tile_ranges_of(const Operation& operation, const StripeInterleave& interleave,
                          int nodes);

// BlockStages has two kinds of owners of blocks. Both say
//   kGathers      whether all nodes receive the results,
//   tiles()       the number of tiles,
//   elements()    the most elements that a node owns of a tile,
//   each_run(t, owner, visit)  calls visit(chunk, index of its first element among those that `owner`
//                              owns of tile t) for all of these; returns their number.

// Nodes own elements by index, as ranks do on a single node (CyclicChunks).
class CyclicOwners {
 public:
  static constexpr bool kGathers = true;

  // `operation` is the one on this link; `tile_ranges` are the tiles of its tensor.
  CyclicOwners(Link& link, const Operation& operation, const TileRanges& tile_ranges)
      : tile_ranges_(tile_ranges),
        chunks_(link, first_element(operation), kOwnedElements),
        first_period_(first_element(operation) / (link.size() * kOwnedElements)) {}

  std::int64_t tiles() const { return tile_ranges_.tiles(); }
  std::int64_t elements() const { return tile_ranges_.periods_per_tile * kOwnedElements; }
  template <class Visit>
  std::int64_t each_run(std::int64_t t, int owner, Visit visit) const {
    const std::int64_t first = t * tile_ranges_.periods_per_tile;
    const std::int64_t end =
        std::min(first + tile_ranges_.periods_per_tile, tile_ranges_.periods());
    // A period of the whole tensor holds one period of each stripe. If the tensor begins after this
    // stripe's part of a period, the stripe begins with the next one.
    const std::int64_t before = tile_ranges_.first_period() - first_period_;
    std::int64_t elements = 0;
    for (std::int64_t period = first; period < end; ++period) {
      const Chunk chunk = chunks_(before + period, owner);
      visit(chunk, elements);
      elements += chunk.count;
    }
    return elements;
  }

 private:
  TileRanges tile_ranges_;
  CyclicChunks<Link> chunks_;
  std::int64_t first_period_;  // of the chunks, in the whole tensor
};

// Each node owns a range, whose result is the output of its rank.
class RangeOwners {
 public:
  static constexpr bool kGathers = false;

  RangeOwners(std::vector<Range> owned, const Codec& codec);

  std::int64_t tiles() const { return ranges_.tiles(); }
  std::int64_t elements() const { return ranges_.tile; }
  template <class Visit>
  std::int64_t each_run(std::int64_t t, int owner, Visit visit) const {
    const Range piece = ranges_.piece(t, owner);
    const std::int64_t begin = ranges_.owned[static_cast<std::size_t>(owner)].begin;
    visit(Chunk{piece.begin, piece.begin - begin, 0, piece.count}, std::int64_t{0});
    return piece.count;
  }

 private:
  OwnedRanges ranges_;
};

// Areas for up to so many encoded elements each.
struct EncodedAreas {
  EncodedAreas(const Codec& codec, std::int64_t elements);

  // Adds the transfers of the first elements of an area.
  void add_transfers(std::vector<Transfer>& transfers, int node, const Location& area,
                     std::int64_t elements) const;

  CodedStaging staging;  // an area's layout, for the codec's executor
  bool scaled;
  std::int64_t bytes;  // of an area
};

// Encoded blocks.
template <class Owners>
class BlockStages {
 public:
  BlockStages(Link& link, CodedComm<Link>& coded, const EncodedAreas& layout, const Owners& owners,
              Scratch& scratch);

  std::int64_t tiles() const { return owners_.tiles(); }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return Owners::kGathers; }
  void stage(std::int64_t t);
  Batch staged(std::int64_t t) const;
  void reduce(std::int64_t t);
  Batch reduced(std::int64_t t) const;
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t t);

 private:
  // What an area is for: contributions that this rank sends to an owner, contributions that it
  // receives and reduces, or results.
  enum class Use { contribution, incoming, result };
  static constexpr int kUses = Owners::kGathers ? 3 : 2;

  Location area(std::int64_t t, Use use, int node) const;
  std::int64_t elements(std::int64_t t, int owner) const {
    return owners_.each_run(t, owner, [](const Chunk&, std::int64_t) {});
  }

  Link& link_;
  CodedComm<Link>& coded_;
  const EncodedAreas layout_;
  const Owners owners_;
  std::byte* areas_;
};

// Top-k lists, in one tile. The length of each list is sent ahead of it; a long list takes several
// batches.
class ListStages {
 public:
  // `lengths` must outlive the batches, even if the exchange fails.
  ListStages(Link& link, TopkComm<Link>& coded, std::vector<std::int64_t>& lengths);

  static constexpr std::int64_t tiles() { return 1; }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return true; }
  void stage(std::int64_t);
  Batch staged(std::int64_t);
  void reduce(std::int64_t);
  Batch reduced(std::int64_t);
  void meanwhile(std::int64_t);
  void gather(std::int64_t);

 private:
  Batch with_lengths(bool result);

  Link& link_;
  TopkComm<Link>& coded_;
  std::vector<std::int64_t>& lengths_;  // bytes sent to each node, then bytes received from each
};

}  // namespace pycomm::cpu

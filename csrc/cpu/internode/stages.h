// The stages of an exchange (core/algorithms/internode.h) on one link: for plain tensors, for
// encoded blocks, and for top-k lists.
#pragma once

#include <algorithm>

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

// A plain tensor, sent from its memory and received in place.
class PlainStages {
 public:
  // `owned` is the range of `data` that each node owns. `reduces`: owned elements become the sums
  // of all nodes' contributions, which each node has at the same place in its `data`. `gathers`:
  // all nodes receive the owned elements, in place. Tiles overlap only if they are reduced, so
  // without that transfers are as large as they may be: each costs a wake-up.
  struct Work {
    std::byte* data;
    std::vector<Range> owned;
    bool reduces;
    bool gathers;
  };

  PlainStages(Link& link, const Operation& operation, Work work, Scratch& scratch);

  std::int64_t tiles() const { return tiles_; }
  bool reduces() const { return work_.reduces; }
  bool gathers() const { return work_.gathers; }
  void stage(std::int64_t) {}
  Batch staged(std::int64_t t) const;
  void reduce(std::int64_t t);
  Batch reduced(std::int64_t t) const;
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t) {}

 private:
  Tiles cut(const Range& owned) const { return {owned.count, transfer_bytes_ / element_size_}; }
  Range piece(std::int64_t t, int node) const;
  Transfer transfer(int to, std::byte* data, const Range& range) const {
    return {to, data, range.count * element_size_};
  }
  std::int64_t largest_bytes() const;
  std::byte* at(const Range& range) const { return work_.data + range.begin * element_size_; }
  std::byte* incoming(std::int64_t t, int node) const {
    return incoming_ + (t % kTilesUnderWay * link_.size() + node) * transfer_bytes_;
  }

  Link& link_;
  Work work_;
  const std::int64_t element_size_;
  const std::int64_t transfer_bytes_;
  const ReduceLoop loop_;
  const std::int64_t tiles_;
  std::byte* incoming_;
  std::vector<const void*> sources_;
};

// The tiles of an exchange. For block codecs, a tile has as many periods as make a transfer
// worthwhile. For top-k, which selects from the whole tensor, one tile has all periods.
TileRanges tile_ranges_of(const Operation& operation, const StripeInterleave& interleave,
                          int nodes);

// Encoded blocks. Nodes own elements by index, as ranks do on a single node (CyclicChunks).
class BlockStages {
 public:
  // `operation` is the one on this link; `tile_ranges` are the tiles of its tensor.
  BlockStages(Link& link, CodedComm<Link>& coded, const Operation& operation,
              const TileRanges& tile_ranges, Scratch& scratch);
  // The staging layout for the codec's executor.
  static CodedStaging staging(const Codec& codec, const TileRanges& tile_ranges);

  std::int64_t tiles() const { return tile_ranges_.tiles(); }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return true; }
  void stage(std::int64_t t);
  Batch staged(std::int64_t t) const;
  void reduce(std::int64_t t);
  Batch reduced(std::int64_t t) const;
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t t);

 private:
  // What a region is for: contributions that this rank sends to an owner, contributions that it
  // receives and reduces, or results.
  enum class Use { contribution, incoming, result };

  Location region(std::int64_t t, Use use, int node) const;
  // Calls visit(range of the tensor, index of its first element in the region) for the elements of
  // tile t that `owner` owns. Returns their number.
  template <class Visit>
  std::int64_t each_run(std::int64_t t, int owner, Visit visit) const;
  void add_transfers(std::vector<Transfer>& transfers, int node, const Location& region,
                     std::int64_t elements) const;
  std::int64_t elements(std::int64_t t, int owner) const;

  Link& link_;
  CodedComm<Link>& coded_;
  const CodedStaging staging_;
  const bool scaled_;
  const std::int64_t region_bytes_;
  const TileRanges tile_ranges_;
  CyclicChunks<Link> chunks_;
  std::byte* regions_;
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

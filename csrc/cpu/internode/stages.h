// What one rank's link does in an exchange (core/algorithms/internode.h): of a tensor as it is, of encoded blocks,
// of top-k lists.
#pragma once

#include <algorithm>

#include "core/algorithms/internode.h"
#include "core/algorithms/stripes.h"
#include "cpu/codecs/coded_comm.h"
#include "cpu/codecs/topk_comm.h"
#include "cpu/internode/link.h"

namespace pycomm::cpu {

// Of what a node owns, a transfer is an eighth, so that tiles overlap; but no less than 32 KiB, and
// the transfers of a tile no more than a MiB together.
inline constexpr std::int64_t kTiles = 8, kLeastTransferBytes = 32 << 10, kMostTileBytes = 1 << 20;

constexpr std::int64_t transfer_bytes(std::int64_t owned_bytes, int nodes) {
  const std::int64_t most = std::max(kMostTileBytes / nodes / kLine * kLine, kLeastTransferBytes);
  return std::clamp(round_up(ceil_div(owned_bytes, kTiles), kLine), kLeastTransferBytes, most);
}

// A tensor as it is, sent from where it lies; what others own comes to where it shall lie.
class PlainStages {
 public:
  // The elements that each node owns, and where they lie. `reduces`: they are sums of all
  // nodes' contributions, which all have here; `gathers`: all get them, here.
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

// Of blocks, so many turns that a transfer is worth its trip; of top-k, whose selection is of the whole,
// all of them.
TileRanges tile_ranges_of(const Operation& operation, const StripeInterleave& interleave,
                          int nodes);

// Blocks of encoded elements. Nodes own them by index, as ranks do on one node
// (CyclicChunks).
class BlockStages {
 public:
  // `operation`: of the link, whose tensor is cut into these tile_ranges of the whole.
  BlockStages(Link& link, CodedComm<Link>& coded, const Operation& operation,
              const TileRanges& tile_ranges, Scratch& scratch);
  // As the codec's executor needs it.
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
  // What this rank sends to an owner; what it receives to reduce; results.
  enum class Use { contribution, incoming, result };

  Location region(std::int64_t t, Use use, int node) const;
  // visit(range of the tensor, index of its first element in a region).
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
  CyclicChunks<Link> turns_;
  std::byte* regions_;
};

// Lists of top-k, in one tile. How long a list is goes ahead of it; a long one takes several batches.
class ListStages {
 public:
  // `lengths`: memory that outlives the batches, whatever becomes of them.
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
  std::vector<std::int64_t>& lengths_;  // bytes that each node gets, then what each sends
};

}  // namespace pycomm::cpu

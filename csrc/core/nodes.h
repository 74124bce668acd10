// The distribution of a group's ranks over nodes, and what each node owns in an exchange with others.
#pragma once

#include <algorithm>
#include <vector>

#include "core/algorithms/coded.h"
#include "core/algorithms/relay.h"
#include "core/algorithms/stripes.h"
#include "core/codecs/topk.h"
#include "core/operation.h"

namespace pycomm {

struct Nodes {
  // The ranks of each node, ascending. Nodes are ordered by their first rank.
  std::vector<std::vector<int>> ranks;
  int here = 0;  // this node

  int count() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& at(int node) const { return ranks[static_cast<std::size_t>(node)]; }
  int size(int node) const { return static_cast<int>(at(node).size()); }
  int rank(int node, int i) const { return at(node)[static_cast<std::size_t>(i)]; }
  // The number of ranks of the whole group.
  int world() const { return before(count()); }
  // The number of ranks on nodes before this one, which is the position of its blocks in node
  // order.
  int before(int node) const {
    int sum = 0;
    for (int m = 0; m < node; ++m) sum += size(m);
    return sum;
  }
  // The number of stripes, which is the number of ranks per node that exchange with other nodes:
  // 0 on a single node.
  int stripes() const {
    if (count() == 1) return 0;
    int least = size(0);
    for (int m = 1; m < count(); ++m) least = std::min(least, size(m));
    return least;
  }
  // True if every node has one rank.
  bool single() const { return world() == count(); }
  // The node of a rank; count() if there is none.
  int node_of(int rank) const {
    int m = 0;
    while (m < count() && std::find(at(m).begin(), at(m).end(), rank) == at(m).end()) ++m;
    return m;
  }
  // True if node order is rank order.
  bool in_order() const {
    int next = 0;
    for (const auto& node : ranks) {
      for (const int rank : node) {
        if (rank != next++) return false;
      }
    }
    return true;
  }
};

// Contiguous stripes begin at multiples of this: at cache lines, or compressed at the codec's blocks.
inline std::int64_t stripe_unit(const Operation& operation) {
  return operation.codec.kind == CodecKind::none ? kLine / size_of(operation.dtype)
                                                 : block_of(operation.codec);
}

// The part of so many elements that a contiguous stripe carries.
inline Range stripe_of(const Operation& operation, const Nodes& nodes, int stripe,
                       std::int64_t begin, std::int64_t count) {
  const Range part = part_of(count, nodes.stripes(), stripe, stripe_unit(operation));
  return {begin + part.begin, part.count};
}

// A stripe of so few bytes is sent whole to all nodes, and each of them adds it up. The result needs
// no second message then.
inline constexpr std::int64_t kSentWholeBytes = 32 << 10;
inline bool adds_everywhere(const Operation& operation, const Nodes& nodes, int stripe) {
  const Range all = stripe_of(operation, nodes, stripe, 0, operation.count);
  return operation.collective == Collective::all_reduce && !relays(operation.algorithm) &&
         (nodes.count() - 1) * all.count * size_of(operation.dtype) <= kSentWholeBytes;
}

// Among more nodes than this, such a stripe travels in rounds (core/algorithms/dissemination.h): the
// messages to all others would take a node longer than the rounds take to arrive.
inline constexpr int kMostNodesSentTo = 8;
inline bool travels_in_rounds(const Operation& operation, const Nodes& nodes, int stripe) {
  return nodes.count() > kMostNodesSentTo && operation.codec.kind == CodecKind::none &&
         adds_everywhere(operation, nodes, stripe) &&
         stripe_of(operation, nodes, stripe, 0, operation.count).count > 0;
}

// What a ring or a tree of nodes passes on of a stripe, whose operation has so many elements.
inline RelayTensor relayed(const Operation& operation, const Nodes& nodes, std::int64_t count) {
  const bool plain = operation.codec.kind == CodecKind::none;
  const std::int64_t bytes = plain ? size_of(operation.dtype) : payload_size(operation.codec);
  return {count, stripe_unit(operation), bytes, nodes.count(), nodes.here};
}

// What each node owns of a contiguous stripe: it adds it up, or has it for all others.
inline std::vector<Range> owned_by_nodes(const Operation& operation, const Nodes& nodes,
                                         int stripe) {
  std::vector<Range> owned(static_cast<std::size_t>(nodes.count()));
  for (int m = 0; m < nodes.count(); ++m) {
    Range& mine = owned[static_cast<std::size_t>(m)];
    switch (operation.collective) {
      case Collective::all_reduce:
      case Collective::reduce: {
        const Range all = stripe_of(operation, nodes, stripe, 0, operation.count);
        if (adds_everywhere(operation, nodes, stripe)) {
          mine = all;
          break;
        }
        mine = part_of(all.count, nodes.count(), m, kLine / size_of(operation.dtype));
        mine.begin += all.begin;
        break;
      }
      case Collective::reduce_scatter:
      case Collective::all_gather:  // a block per rank, in the order of nodes
        mine = stripe_of(operation, nodes, stripe, nodes.before(m) * operation.count,
                         nodes.size(m) * operation.count);
        break;
      case Collective::broadcast:
        if (m == nodes.node_of(operation.root))
          mine = stripe_of(operation, nodes, stripe, 0, operation.count);
        break;
      default:  // nothing crosses, or it does not span nodes
        break;
    }
  }
  return owned;
}

// In a compressed all-reduce, stripes take turns by index, and so do nodes within a stripe's turn.
inline std::int64_t owned_elements(const Codec& codec) {
  return codec.kind == CodecKind::topk ? kTopkChunk : kOwnedElements;
}
inline StripeInterleave interleave_of(const Codec& codec, const Nodes& nodes) {
  return {nodes.count() * owned_elements(codec), nodes.stripes()};
}

// A compressed operation on a stripe alone: on the sum of a node's ranks, or on its one rank's tensor.
inline Operation carried_by(const Operation& operation, const Nodes& nodes, int stripe) {
  Operation carried = operation;
  if (nodes.single()) return carried;
  const StripeInterleave interleave = interleave_of(operation.codec, nodes);
  const std::int64_t first = first_element(operation), n = operation.count;
  const std::int64_t before = interleave.before(first, stripe);
  carried.dtype = DType::f32;
  carried.count = interleave.before(first + n, stripe) - before;
  carried.offset = static_cast<std::uint32_t>(before / kSmallestBlock);
  if (n > 0) {
    // Both counts are less than 2^32.
    const std::uint64_t k = operation.codec.k;
    const auto all = k * static_cast<std::uint64_t>(carried.count), whole = std::uint64_t(n);
    carried.codec.k = static_cast<std::uint32_t>(all / whole + (all % whole != 0 ? 1 : 0));
  }
  return carried;
}

}  // namespace pycomm

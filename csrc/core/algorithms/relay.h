// Ring and double-tree all-reduce between nodes, as messages. The tensor is one stripe
// (core/algorithms/stripes.h), and each node takes part as one rank. Here a node relays pieces of
// sums, where two-shot (core/algorithms/internode.h) sends everything straight to its owner.
//
// An operation is a list of steps. In a step, a node receives one piece of the tensor from up to two
// nodes and sends it on to up to two:
//
//   Up:    it receives partial sums, adds its own contribution, and sends the sum on.
//   Down:  it receives the complete sum, and sends it on.
//
// Ring. The tensor is cut into tiles, a tile into a chunk per node, and a chunk into pieces. At step
// s of a tile, node r works on chunk (r-s) mod n, piece by piece: it sends the chunk to node r+1,
// which has it at step s+1. Chunk c goes up through the nodes c, c+1, ..., c-1 (mod n), which add in
// this order, and then down through c, ..., c-2. Per stripe of S bytes on the wire, a node sends and
// receives 2 (n-1)/n S, in 2 (n-1) steps one after another. Reference: Patarasuk and Yuan 2009,
// "Bandwidth optimal all-reduce algorithms for clusters of workstations".
//
// Double tree. Each of two trees (core/layout.h) carries half of the tensor, in pieces. A node adds
// the left child's sum, its own contribution and the right child's sum, in this order. A node works on
// a piece kTreeSlack pieces later than the nodes that send it: so what it waits for is on its way
// while it works on others. Per stripe of S bytes, a
// node receives at most S from two children and S/2 from a parent in the tree where it is an inner
// node, and S/2 from its parent in the other tree: 2 S; it sends as much. About 2 log2 n steps follow
// one another. Reference: Sanders, Speck, Traeff 2009, "Two-tree algorithms for full bandwidth
// broadcast, reduction and scan".
//
// A partial sum is rounded to the tensor's type at every hop, or encoded.
//
// Order: a message that is sent at step i is received at step i + `slack`, the same for all messages.
// So between two nodes, both take up the same messages in the same order. (The root of a tree sends a
// complete piece in its step down, not when it completes it.)
// No deadlock: receives are posted kStepsAhead steps before their step. A node at step i waits for
// what others have sent at step i - slack, and until what it has sent at step i - kStepsAhead has been
// received, for which the receiver must have come to step i - 2 kStepsAhead + slack. Both are earlier
// steps.
// Overwriting: the complete piece may replace the partial sum that this node has sent, because it was
// made from that sum, which has therefore been received. Pieces are received elsewhere, in memory
// that is free again after their step.
#pragma once

#include "core/algorithms/table.h"
#include "core/layout.h"

namespace pycomm {

inline constexpr std::int64_t kStepsAhead = 16;
// The pieces of a ring's chunk, if they are not too small. A chunk has at most kRingChunkBytes.
inline constexpr std::int64_t kRelayPieces = 8;
// How much later, in pieces, a node of a tree works on a piece than the nodes that send it.
inline constexpr std::int64_t kTreeSlack = 4;
static_assert(kRelayPieces < 2 * kStepsAhead && 4 * kTreeSlack < 2 * kStepsAhead);
inline constexpr std::int64_t kLeastPieceBytes = 32 << 10, kMostPieceBytes = 128 << 10;
inline constexpr std::int64_t kRingChunkBytes = kRelayPieces * kMostPieceBytes;

struct RelayStep {
  Range piece{0, 0};        // elements; if there are none, this node has nothing to do
  std::int64_t number = 0;  // of the piece
  bool adds = false;        // up
  bool completes = false;   // this node makes the complete sum
  // Up: the sums of from[0], this node's contribution and the sums of from[1] are added. -1: none.
  int from[2] = {-1, -1};
  int to[2] = {-1, -1};
};

// What the steps depend on. Pieces begin at multiples of `unit` elements, of `bytes` bytes each.
struct RelayTensor {
  std::int64_t count;
  std::int64_t unit;
  std::int64_t bytes;
  int nodes, node;

  // A multiple of the unit with about so many bytes.
  constexpr std::int64_t units_of(std::int64_t most) const {
    return round_up(ceil_div(most, bytes), unit);
  }
  // The size of the pieces of n elements.
  constexpr std::int64_t piece_of(std::int64_t n) const {
    const std::int64_t piece = round_up(ceil_div(n, kRelayPieces), unit);
    const std::int64_t least = units_of(kLeastPieceBytes), most = units_of(kMostPieceBytes);
    return piece < least ? least : piece > most ? most : piece;
  }
};

// Part i of a range that is cut into pieces; empty beyond the last one.
constexpr Range piece_at(const Range& range, std::int64_t piece, std::int64_t i) {
  const Tiles pieces{range.count, piece};
  if (i < 0 || i >= pieces.count()) return {range.begin, 0};
  return {range.begin + pieces[i].begin, pieces[i].count};
}

class RingSteps {
 public:
  explicit constexpr RingSteps(const RelayTensor& x)
      : x_(x),
        tiles_(tiles_of(x)),
        piece_(x.piece_of(tiles_.size / x.nodes)),
        pieces_(ceil_div(tiles_.size / x.nodes, piece_)) {}

  constexpr std::int64_t count() const { return tiles_.count() * (2 * x_.nodes - 1) * pieces_; }
  constexpr std::int64_t piece() const { return piece_; }  // elements of the largest piece
  constexpr std::int64_t pieces() const { return tiles_.count() * x_.nodes * pieces_; }

  constexpr RelayStep operator[](std::int64_t i) const {
    RelayStep step;
    if (i < 0 || i >= count()) return step;
    const int n = x_.nodes, s = static_cast<int>(i / pieces_ % (2 * n - 1));
    const int chunk = (x_.node - s + 2 * n) % n;
    const std::int64_t t = i / pieces_ / (2 * n - 1), p = i % pieces_;
    const Range tile = tiles_[t], part = part_of(tile.count, n, chunk, x_.unit);
    step.piece = piece_at({tile.begin + part.begin, part.count}, piece_, p);
    if (step.piece.count == 0) return {};
    step.number = (t * n + chunk) * pieces_ + p;
    step.adds = s < n;
    step.completes = s == n - 1;
    if (s > 0) step.from[0] = (x_.node + n - 1) % n;
    if (s < 2 * n - 2) step.to[0] = (x_.node + 1) % n;
    return step;
  }

 private:
  // Tiles of equal size, with chunks of at most kRingChunkBytes.
  static constexpr Tiles tiles_of(const RelayTensor& x) {
    const std::int64_t least = ceil_div(x.count, x.units_of(kRingChunkBytes) * x.nodes);
    return {x.count, round_up(ceil_div(x.count, least > 0 ? least : 1), x.unit * x.nodes)};
  }

  const RelayTensor x_;
  const Tiles tiles_;
  const std::int64_t piece_, pieces_;  // elements of a piece; pieces of a chunk
};

class TreeSteps {
 public:
  explicit constexpr TreeSteps(const RelayTensor& x)
      : x_(x),
        piece_(x.piece_of(half(0).count)),
        pieces_(ceil_div(half(0).count, piece_)),
        above_{above(0), above(1)} {}

  constexpr std::int64_t count() const {
    return pieces_ == 0 ? 0 : 4 * (pieces_ + 2 * tree_depth(x_.nodes) * kTreeSlack);
  }
  constexpr std::int64_t piece() const { return piece_; }
  constexpr std::int64_t pieces() const { return 2 * pieces_; }

  // The steps come in fours: up in the first tree, up in the second, down in the first, down in the
  // second. A piece goes up through the deepest nodes first, and down through the root first.
  constexpr RelayStep operator[](std::int64_t i) const {
    RelayStep step;
    if (i < 0 || i >= count()) return step;
    const int tree = static_cast<int>(i % 2);
    const bool up = i % 4 < 2;
    const int levels = tree_depth(x_.nodes) + (up ? -above_[tree] : above_[tree]);
    const std::int64_t k = i / 4 - levels * kTreeSlack;
    const TreeNode node = tree_node(tree, x_.node, x_.nodes);
    step.piece = piece_at(half(tree), piece_, k);
    if (step.piece.count == 0) return {};
    step.number = tree * pieces_ + k;
    step.adds = up;
    step.completes = up && node.parent < 0;
    const int children[] = {node.left, node.right}, parent[] = {node.parent, -1};
    for (int j = 0; j < 2; ++j) {
      step.from[j] = up ? children[j] : parent[j];
      step.to[j] = up ? parent[j] : children[j];
    }
    return step;
  }

 private:
  constexpr Range half(int tree) const { return part_of(x_.count, 2, tree, x_.unit); }
  // The number of nodes above this one.
  constexpr int above(int tree) const {
    int levels = 0;
    for (int v = x_.node; (v = tree_node(tree, v, x_.nodes).parent) >= 0;) ++levels;
    return levels;
  }

  const RelayTensor x_;
  const std::int64_t piece_, pieces_;  // elements of a piece; pieces of a half
  const int above_[2];
};

// True if an all-reduce between nodes is made of these steps.
constexpr bool relays(Algorithm algorithm) { return Algorithms::partial_sums(algorithm); }

// Calls visit(steps) with the steps of an algorithm that relays.
template <class Visit>
void visit_steps(Algorithm algorithm, const RelayTensor& x, Visit visit) {
  if (algorithm == Algorithm::ring) return visit(RingSteps(x));
  visit(TreeSteps(x));
}

// Link: as in core/algorithms/internode.h. Pieces: one operation's data. combine(step, i) makes this
// node's sum of a piece, or takes over the complete one; transfers(sent, received, i) returns the
// batch that sends the piece of one step and receives that of another, whose index is i.
template <class Link, class Steps, class Pieces>
void relay(Link& link, const Steps& steps, Pieces& pieces) {
  std::int64_t posted[kStepsAhead]{}, last = 0;
  for (std::int64_t i = -kStepsAhead; i < steps.count(); ++i) {
    std::int64_t& batch = posted[(i + kStepsAhead) % kStepsAhead];
    const RelayStep step = steps[i];
    if (i >= 0) link.wait(batch);
    if (step.piece.count > 0) pieces.combine(step, i);
    const auto transfers = pieces.transfers(step, steps[i + kStepsAhead], i + kStepsAhead);
    if (!transfers.sends.empty() || !transfers.receives.empty()) last = link.post(transfers);
    batch = last;
  }
  link.wait(last);
}

}  // namespace pycomm

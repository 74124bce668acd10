// Tree all-reduce: a double binary tree, pipelined.
//
//   Two trees span the ranks. Each tree carries one half of the tensor, and a rank is an inner node
//   of at most one of them (core/layout.h). A half is cut into pieces. For piece k, in each tree:
//   1. Up: a node adds the left child's partial sum, its own contribution and the right child's
//      partial sum, in this order. It keeps the sum where its parent reads it. At the root the sum
//      is complete.
//   2. Down: a node copies the complete piece from its parent and keeps it for its children. Down
//      runs `lag` pieces behind up, so that other pieces fill the way to the root and back.
//
// Per rank, for S bytes: at most S read from two children and S/2 from a parent in the tree where
// it is an inner node, and S/2 from its parent in the other tree: 2 S. 2 signals per piece and
// tree. Partial sums are rounded to the tensor's type at every inner node, in the tree's order.
// Reference: Sanders, Speck, Traeff 2009, "Two-tree algorithms for full bandwidth broadcast,
// reduction and scan".
//
// No deadlock: up waits only for the same piece lower in the tree, down only for the same piece
// higher in the tree, and every rank processes pieces in the same order (by piece, then up before
// down, then by tree).
// Overwriting: the complete piece may replace a partial sum, because it came through the parent,
// which had read that partial sum.
// Slots: the slot of piece k - kStagingSlots is free when piece k goes up, because a child that has
// sent piece k up has finished piece k-1-lag on its way down, and lag < kStagingSlots.
#pragma once

#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

inline constexpr std::int64_t kTreePieceBytes = 64 << 10;

template <class Comm>
struct HalfTree {
  Comm& comm;
  Range half;
  TreeNode node;
  Tiles pieces;
  int index;  // which of the two trees

  PYCOMM_HD int up_channel() const { return kUp - 2 * index; }      // kUp or kStaged
  PYCOMM_HD int down_channel() const { return kDown - 2 * index; }  // kDown or kReduced

  // Where rank r keeps piece k for its parent and children.
  PYCOMM_HD Location kept(int r, std::int64_t k) const {
    if (comm.zero_copy()) return comm.at(comm.output(r), half.begin + pieces[k].begin);
    const std::int64_t place = index * kStagingSlots + k % kStagingSlots;
    return comm.at(comm.slot(r, 0), place * pieces.size);
  }

  PYCOMM_HD void wait_children(int channel, std::int64_t step) const {
    if (node.left >= 0) comm.wait(node.left, channel, step);
    if (node.right >= 0) comm.wait(node.right, channel, step);
  }

  PYCOMM_HD void up(std::int64_t k) const {
    const int me = comm.rank();
    wait_children(up_channel(), k + 1);
    const Range piece = pieces[k];
    const Location in = comm.at(comm.input(), half.begin + piece.begin);
    const Location out = comm.at(comm.output(), half.begin + piece.begin);
    const bool root = node.parent < 0;
    if (node.left < 0 && node.right < 0) {
      comm.copy(kept(me, k), in, piece.count);
    } else {
      const int before = node.left >= 0 ? 1 : 0;
      comm.reduce(
          root && !comm.zero_copy() ? 2 : 1, [&](int i) { return i == 0 ? kept(me, k) : out; },
          1 + before + (node.right >= 0 ? 1 : 0),
          [&](int i) {
            return i < before ? kept(node.left, k) : i == before ? in : kept(node.right, k);
          },
          piece.count, root);
    }
    comm.signal(up_channel());
    if (root) comm.signal(down_channel());
  }

  PYCOMM_HD void down(std::int64_t k) const {
    if (node.parent < 0) return;
    comm.wait(node.parent, down_channel(), k + 1);
    const Range piece = pieces[k];
    const Location out = comm.at(comm.output(), half.begin + piece.begin);
    const Location mine = node.left < 0 && node.right < 0 ? out : kept(comm.rank(), k);
    comm.copy(mine, kept(node.parent, k), piece.count);
    comm.copy(out, mine, piece.count);
    comm.signal(down_channel());
  }
};

template <Executor Comm>
PYCOMM_HD void tree(Comm& comm) {
  comm.announce();
  const int n = comm.size(), me = comm.rank();
  std::int64_t size = comm.elements(kTreePieceBytes);
  // Both trees' slots share the staging area.
  const std::int64_t room = comm.slot_count() / 2 / comm.line() * comm.line();
  if (!comm.zero_copy() && size > room) size = room;

  const auto tree_of = [&](int index) {
    const Range half = part_of(comm.count(), 2, index, comm.line());
    return HalfTree<Comm>{comm, half, tree_node(index, me, n), Tiles{half.count, size}, index};
  };
  const HalfTree<Comm> first = tree_of(0), second = tree_of(1);
  const std::int64_t pieces = first.pieces.count();  // the second half is never longer
  const std::int64_t depth = tree_depth(n);
  const std::int64_t lag = depth < kStagingSlots - 1 ? depth : kStagingSlots - 1;
  for (std::int64_t k = 0; k < pieces + lag; ++k) {
    if (k < first.pieces.count()) first.up(k);
    if (k < second.pieces.count()) second.up(k);
    if (k >= lag && k - lag < first.pieces.count()) first.down(k - lag);
    if (k >= lag && k - lag < second.pieces.count()) second.down(k - lag);
  }
  if (comm.zero_copy()) {
    first.wait_children(first.down_channel(), first.pieces.count());
    second.wait_children(second.down_channel(), second.pieces.count());
  }
}

}  // namespace pycomm

// How n elements are split into tiles, and a tile into the chunks that ranks own. Index arithmetic
// only.
#pragma once

#include "core/types.h"

namespace pycomm {

// Bytes in a cache line. Chunks begin at multiples of it, so that no two ranks write to the same
// line.
inline constexpr std::int64_t kLine = 64;

struct Range {
  std::int64_t begin;
  std::int64_t count;
};

PYCOMM_HD constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

PYCOMM_HD constexpr std::int64_t round_up(std::int64_t a, std::int64_t unit) {
  return ceil_div(a, unit) * unit;
}

// How many elements of a range lie before element `end`.
PYCOMM_HD constexpr std::int64_t overlap(const Range& range, std::int64_t end) {
  const std::int64_t before = end - range.begin;
  return before < 0 ? 0 : before < range.count ? before : range.count;
}

// Part `index` of `count` elements that are cut into `parts` parts, as evenly as boundaries at
// multiples of `unit` allow. The first parts are the longer ones; the last ones may be short or
// empty.
PYCOMM_HD constexpr Range part_of(std::int64_t count, std::int64_t parts, std::int64_t index,
                                  std::int64_t unit) {
  const std::int64_t units = ceil_div(count, unit);
  const std::int64_t base = units / parts, longer = units % parts;
  const std::int64_t begin = (index * base + (index < longer ? index : longer)) * unit;
  const std::int64_t end = begin + (base + (index < longer ? 1 : 0)) * unit;
  return {begin < count ? begin : count,
          (end < count ? end : count) - (begin < count ? begin : count)};
}

// `total` elements cut into tiles of `size`. The last tile may be short; zero elements have zero
// tiles.
struct Tiles {
  std::int64_t total;
  std::int64_t size;

  PYCOMM_HD constexpr std::int64_t count() const { return total == 0 ? 0 : ceil_div(total, size); }
  PYCOMM_HD constexpr Range operator[](std::int64_t i) const {
    const std::int64_t begin = i * size;
    return {begin, total - begin < size ? total - begin : size};
  }
};

// A node of one of the two binary trees of the double tree (Sanders, Speck, Traeff 2009). Tree 0
// numbers its nodes in order, so its leaves are the even ranks. Tree 1 is tree 0 mirrored if the
// number of ranks is even, and shifted by one if it is odd. So a rank is an inner node of at most
// one tree. -1 stands for "none".
struct TreeNode {
  int parent = -1;
  int left = -1;
  int right = -1;
};

namespace detail {

// The parent of `v` in the in-order tree over 0..n-1: climbs until the ancestor exists.
PYCOMM_HD constexpr int in_order_parent(int v, int n) {
  int step = 1;
  while (((v + 1) & step) == 0) step <<= 1;
  while (true) {
    const int up = ((v + 1) & (step << 1)) != 0 ? v - step : v + step;
    if (step > n) return -1;
    if (up < n) return up;
    v = up;
    step <<= 1;
  }
}

PYCOMM_HD constexpr int in_order_right(int v, int n) {
  int step = 1;
  while (((v + 1) & step) == 0) step <<= 1;
  for (step >>= 1; step > 0; step >>= 1) {
    if (v + step < n) return v + step;
  }
  return -1;
}

PYCOMM_HD constexpr int to_tree(int tree, int rank, int n) {
  if (tree == 0) return rank;
  return n % 2 == 0 ? n - 1 - rank : (rank + n - 1) % n;
}

PYCOMM_HD constexpr int from_tree(int tree, int v, int n) {
  if (tree == 0 || v < 0) return v;
  return n % 2 == 0 ? n - 1 - v : (v + 1) % n;
}

}  // namespace detail

PYCOMM_HD constexpr TreeNode tree_node(int tree, int rank, int n) {
  const int v = detail::to_tree(tree, rank, n);
  int step = 1;
  while (((v + 1) & step) == 0) step <<= 1;
  TreeNode node;
  node.parent = detail::from_tree(tree, detail::in_order_parent(v, n), n);
  node.left = step > 1 ? detail::from_tree(tree, v - (step >> 1), n) : -1;
  node.right = detail::from_tree(tree, detail::in_order_right(v, n), n);
  return node;
}

// The number of edges on the longest path from the root to a leaf.
PYCOMM_HD constexpr int tree_depth(int n) {
  int depth = 0;
  while ((1 << (depth + 1)) <= n) ++depth;
  return depth;
}

}  // namespace pycomm

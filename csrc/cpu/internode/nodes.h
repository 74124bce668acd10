// The distribution of a group's ranks over nodes.
#pragma once

#include <algorithm>
#include <vector>

namespace pycomm::cpu {

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
  // The number of stripes, which is the number of ranks per node that exchange with other nodes.
  int stripes() const {
    int least = size(0);
    for (int m = 1; m < count(); ++m) least = std::min(least, size(m));
    return least;
  }
  // True if every node has one rank.
  bool single() const { return world() == count(); }
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

}  // namespace pycomm::cpu

// Which ranks of a group are on which node.
#pragma once

#include <algorithm>
#include <vector>

namespace pycomm::cpu {

struct Nodes {
  std::vector<std::vector<int>> ranks;  // of each node, ascending; nodes by their first one
  int here = 0;

  int count() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& at(int node) const { return ranks[static_cast<std::size_t>(node)]; }
  int size(int node) const { return static_cast<int>(at(node).size()); }
  int rank(int node, int i) const { return at(node)[static_cast<std::size_t>(i)]; }
  // Of the whole group.
  int world() const { return before(count()); }
  // Ranks of the nodes before this one: its place where blocks lie in the order of nodes.
  int before(int node) const {
    int sum = 0;
    for (int m = 0; m < node; ++m) sum += size(m);
    return sum;
  }
  // How many ranks of every node exchange with other nodes.
  int stripes() const {
    int least = size(0);
    for (int m = 1; m < count(); ++m) least = std::min(least, size(m));
    return least;
  }
  // One rank per node.
  bool single() const { return world() == count(); }
  // Whether the order of nodes is that of ranks.
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

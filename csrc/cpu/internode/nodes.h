// Which ranks of a group are on which machine.
#pragma once

#include <algorithm>
#include <vector>

namespace pycomm::cpu {

struct Machines {
  std::vector<std::vector<int>> ranks;  // of each machine, ascending; machines by their first one
  int here = 0;

  int count() const { return static_cast<int>(ranks.size()); }
  const std::vector<int>& at(int machine) const { return ranks[static_cast<std::size_t>(machine)]; }
  int size(int machine) const { return static_cast<int>(at(machine).size()); }
  int rank(int machine, int i) const { return at(machine)[static_cast<std::size_t>(i)]; }
  // Of the whole group.
  int world() const { return before(count()); }
  // Ranks of the machines before this one: its place where blocks lie in the order of machines.
  int before(int machine) const {
    int sum = 0;
    for (int m = 0; m < machine; ++m) sum += size(m);
    return sum;
  }
  // How many ranks of every machine exchange with other machines.
  int stripes() const {
    int least = size(0);
    for (int m = 1; m < count(); ++m) least = std::min(least, size(m));
    return least;
  }
  // One rank per machine.
  bool single() const { return world() == count(); }
  // Whether the order of machines is that of ranks.
  bool in_order() const {
    int next = 0;
    for (const auto& machine : ranks) {
      for (const int rank : machine) {
        if (rank != next++) return false;
      }
    }
    return true;
  }
};

}  // namespace pycomm::cpu

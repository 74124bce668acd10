// Messages between nodes: the Link and a Part of core/between.h, for symbols. What is posted may be read
// and written until the round has been waited for, so each round is a thread of its own.
#pragma once

#include <deque>

#include "checker/memory.h"
#include "core/between.h"
#include "core/layout.h"

namespace pycomm::checker {

class Fibers;

struct Parcel {
  int node;  // whom to, or whom from
  std::byte* data;
  std::int64_t units;
};
struct Round {
  std::vector<Parcel> sends, receives;
};

// All that the nodes' links of one stripe share.
class Network {
 public:
  Network(Memory& memory, Fibers& fibers, int nodes)
      : memory(memory),
        fibers(fibers),
        nodes(nodes),
        lines_(static_cast<std::size_t>(nodes * nodes)) {}

  struct Message {
    Pieces pieces;
    Clock clock;
  };
  std::deque<Message>& line(int from, int to) {
    return lines_[static_cast<std::size_t>(from * nodes + to)];
  }

  Memory& memory;
  Fibers& fibers;
  const int nodes;

 private:
  std::vector<std::deque<Message>> lines_;
};

class Link {
 public:
  // Rounds take turns with these threads; more than ever are under way.
  Link(Network& network, int node, Thread& owner, std::vector<Thread*> carriers)
      : network_(network), node_(node), owner_(owner), carriers_(std::move(carriers)) {}

  int rank() const { return node_; }
  int size() const { return network_.nodes; }
  void begin(Unit unit) { unit_ = unit; }
  std::int64_t post(const Round& round);
  void wait(std::int64_t number);

 private:
  Thread& carrier(std::int64_t number) const {
    return *carriers_[static_cast<std::size_t>(number) % carriers_.size()];
  }

  Network& network_;
  const int node_;
  Thread& owner_;
  const std::vector<Thread*> carriers_;
  Unit unit_{1};
  std::deque<Round> under_way_;
  std::int64_t posted_ = 0, waited_ = 0;
};

}  // namespace pycomm::checker

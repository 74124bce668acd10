// Gather, scatter and all-to-all in a group that spans nodes. Each rank sends its blocks to the ranks
// that they are for, as messages (cpu/p2p/engine.h) on a channel of their own.
//
// A block crosses its node's network link once, if it leaves the node, and is read and written in the
// caller's tensors. Each rank begins with the ranks behind it, so that not all send to the same rank
// at first.
#pragma once

#include <vector>

#include "core/call.h"
#include "core/nodes.h"
#include "cpu/executor/blocks.h"
#include "cpu/executor/comm.h"
#include "cpu/p2p/engine.h"

namespace pycomm::cpu {

class BlockMessages {
 public:
  // `timeout` in seconds; 0 for the group's. `interrupt` may throw.
  BlockMessages(Comm& comm, const Nodes& nodes, p2p::Engine& engine, double timeout,
                void (*interrupt)());

  // Runs an operation on which all ranks agree. Throws as Comm does.
  void exchange(const Operation& operation, const Call& call, const CallBlocks& blocks);
  // What this rank has sent to other nodes and received from them.
  const LinkTraffic& traffic() const { return traffic_; }

 private:
  void receive(int from, std::byte* to, std::int64_t bytes);
  void send(int to, const std::byte* from, std::int64_t bytes);
  void await_all();
  void await_ends();
  p2p::Envelope envelope(int peer, std::int64_t bytes) const;
  bool crosses(int rank) const { return comm_.index_of(rank) < 0; }

  Comm& comm_;
  const Nodes& nodes_;
  p2p::Engine& engine_;
  p2p::Options options_;
  void (*const interrupt_)();
  std::vector<p2p::RequestPtr> requests_;
  LinkTraffic traffic_;
};

}  // namespace pycomm::cpu

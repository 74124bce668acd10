// Gather, scatter and all-to-all in a group that spans nodes. Each rank sends its blocks to the ranks
// that they are for, as messages (cpu/p2p/engine.h) on a channel of their own.
//
// A block crosses its node's network link once, if it leaves the node, and is read and written in
// the caller's tensors. Each rank begins with the ranks behind it, so that not all send to the same
// rank at first. Messages are on their way while the ranks find out whether all call the same
// operation. If they do not, messages match no receive, or write to the output of an operation that
// then fails.
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
  // Starts to send and receive an operation's blocks.
  BlockMessages(Comm& comm, const Nodes& nodes, p2p::Engine& engine, const Operation& operation,
                const Call& call);
  // Aborts the group if the operation has failed before it was complete. Afterwards no thread uses
  // the tensors.
  ~BlockMessages();
  BlockMessages(const BlockMessages&) = delete;
  BlockMessages& operator=(const BlockMessages&) = delete;

  // Returns when all blocks have gone and come. Throws as Comm does; `interrupt` may throw.
  void wait(void (*interrupt)());
  const CallBlocks& blocks() const { return blocks_; }
  // What this rank sends to other nodes and receives from them.
  const LinkTraffic& traffic() const { return traffic_; }

 private:
  void end();
  void start(int ranks);
  void start(int rank, bool receives, std::byte* data, std::int64_t bytes);
  bool sends_to(int rank) const;
  bool gets_from(int rank) const;
  // The block for a rank, and the place for the block from a rank.
  std::byte* source(int rank) const;
  std::byte* target(int rank) const;
  std::int64_t bytes(const BlockTable& table, int rank) const {
    return table.bytes(rank, operation_.dtype);
  }
  int self() const { return comm_.number(comm_.rank()); }
  bool is(Collective collective) const { return operation_.collective == collective; }

  Comm& comm_;
  p2p::Engine& engine_;
  const Operation& operation_;
  const Call& call_;
  const CallBlocks blocks_;
  std::vector<p2p::RequestPtr> requests_;
  LinkTraffic traffic_;
};

}  // namespace pycomm::cpu

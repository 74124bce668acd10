// Operations of a group that spans nodes, in three phases.
//
//   1. Inside each node: reduce-scatter to the ranks that carry stripes
//      (core/algorithms/stripes.h), in rank order. The partial sums are rounded to the tensor's
//      type, in which they are sent.
//   2. Between nodes, all stripes in parallel: two-shot in node order
//      (core/algorithms/internode.h). AVG divides here, once, by the number of all ranks. A small
//      stripe is sent whole to all nodes instead, among many nodes in rounds
//      (core/algorithms/dissemination.h). A ring or a double tree, if the caller or the
//      group's table names it (core/algorithms/relay.h).
//   3. Inside each node: all-gather of the stripes.
//
// So a tensor crosses a node's network link as if the node had a single rank, however many it has.
//
// Compressed operations treat the ranks of a node as one (cpu/internode/aggregate.h), and the
// phases overlap tile by tile. Their stripes are interleaved by index. If every node has one rank,
// the codec is applied to the tensors themselves, and the bits are those of a single node with as
// many ranks.
//
// Reduce is an all-reduce whose results, in phases 2 and 3, only the root's node gets. Gather,
// scatter and all-to-all move blocks from rank to rank (cpu/internode/blocks.h). Lists of tensors
// and blocks of different sizes are copied to and from tensors with equal blocks, as large as the
// largest one.
//
// A compressed reduce-scatter has the phases of an uncompressed one. The node's sums stay in fp32, and
// a stripe begins at a block of the codec. Between nodes, all parts are encoded, the node's own, too;
// the sums are not encoded again.
#pragma once

#include <memory>

#include "core/algorithms/stripes.h"
#include "core/call.h"
#include "core/errors.h"
#include "core/record.h"
#include "cpu/codecs/topk_comm.h"
#include "cpu/internode/aggregate.h"
#include "cpu/internode/link.h"
#include "cpu/internode/relay.h"
#include "cpu/internode/stages.h"

namespace pycomm::cpu {

namespace p2p {
class Engine;
}
struct CallBlocks;

class InternodeGroup {
 public:
  // `transport` connects this rank's stripe to the other nodes; null if this rank carries no
  // stripe.
  InternodeGroup(Comm& comm, Nodes nodes, std::shared_ptr<Transport> transport,
                 Clock::duration timeout);

  // Runs an operation whose algorithm has been chosen. For a compressed operation, returns true if
  // a value was not finite. `engine` is this rank's; it moves blocks.
  bool run(const Operation& operation, const Call& call, void (*interrupt)(), p2p::Engine* engine);

  const Nodes& nodes() const { return nodes_; }
  // What this rank sent to other nodes and received from them in the last operation.
  LinkTraffic traffic() const { return traffic_; }
  // Tells the other nodes that this node has been aborted.
  void tell() {
    if (link_ != nullptr) link_->tell();
  }
  // Ends communication after an abort. Afterwards all nodes blame the same rank, and the transport
  // no longer uses memory of posted transfers.
  void stop() {
    if (link_ != nullptr) link_->stop();
  }
  void leave() {
    if (link_ != nullptr) link_->leave();
  }
  // What this rank knows of the other nodes. From any thread.
  std::vector<NodeState> other_nodes();
  // Frees the buffers that operations leave to the next one. Call it between operations.
  void trim();

 private:
  bool owns_stripe() const { return link_ != nullptr; }
  void begin(const Operation& operation, void (*interrupt)());
  Operation phase(const Operation& operation, std::int64_t count) const;
  static void move_bytes(void* to, const void* from, std::int64_t bytes);

  void all_reduce(const Operation& operation, const Call& call);
  void reduce_scatter(const Operation& operation, const Call& call);
  void all_gather(const Operation& operation, const Call& call);
  void broadcast(const Operation& operation, const Call& call);
  void barrier(const Operation& operation);
  void reduce(const Operation& operation, const Call& call);
  void run_plain(const Operation& operation, const Call& call, p2p::Engine* engine,
                 void (*interrupt)());

  // Blocks, in cpu/internode/blocks.cpp.
  void move_blocks(const Operation& operation, const Call& call, p2p::Engine& engine,
                   void (*interrupt)());
  void in_equal_blocks(const Operation& operation, const Call& call);
  [[noreturn]] void fail_together(const Operation& operation, const CollectiveError& error);
  void check_counts(const Operation& operation, const CallBlocks& blocks);

  void reduce_to_stripes(const Operation& operation, std::int64_t count, const void* input,
                         void* output);
  Preflight gather_stripes(const Operation& operation, std::int64_t count, void* data,
                           Preflight mine = {});
  void exchange_plain(const Operation& operation, std::byte* data, bool reduces, bool gathers,
                      int to = kAllNodes);
  void relay_plain(const Operation& operation, std::byte* data);
  bool disseminates(const Operation& operation) const {
    return owns_stripe() && travels_in_rounds(operation, nodes_, comm_.rank());
  }
  void disseminate_plain(const Operation& operation, std::byte* data);
  std::int64_t begin_of_blocks(int node, std::int64_t block) const {
    return nodes_.before(node) * block;
  }
  const std::byte* in_node_order(const void* blocks, std::int64_t bytes);
  const std::byte* in_node_order(const void* blocks, std::int64_t bytes, bool from_rank_order,
                                 std::byte* to) const;

  bool compressed(const Operation& operation, const Call& call);
  bool compressed_sum(const Operation& operation, const Call& call);
  float largest_result(const Operation& operation) const;
  Preflight exchange_coded(const Operation& operation, const Call& call, float largest_result,
                           NodeAggregate* aggregate);
  Preflight relay_coded(const Operation& operation, const Call& call, float limit,
                        NodeAggregate* aggregate);
  template <class Coded, class Stages>
  Preflight exchange_parts(const Coded& coded, Stages stages, NodeAggregate* aggregate);
  Preflight agree(Preflight mine);

  bool compressed_reduce_scatter(const Operation& operation, const Call& call);
  float* sum_blocks(const Operation& operation, const void* input);
  Preflight exchange_sums(const Operation& operation, const Call& call, float* sums,
                          std::byte* here);
  Preflight exchange_blocks(const Operation& operation, const Call& call, float largest_result);
  Preflight tell_nodes(const Call& call, Preflight found);

  Comm& comm_;
  const Nodes nodes_;
  std::unique_ptr<Link> link_;
  TopkWorkspace topk_;
  std::vector<std::int64_t> list_lengths_;
  std::vector<std::byte> verdicts_;  // one per node
  AggregateMemory aggregate_memory_;
  LinkTraffic traffic_;
  struct {
    Scratch incoming, blocks, sums, listed;
  } scratch_;
};

}  // namespace pycomm::cpu

// What an operation costs a rank: steps, and bytes between ranks and between nodes.
//
// There are no formulas for algorithms here. Their own text runs on an executor that moves nothing and
// counts, so that a new algorithm or codec has its costs at once. Between nodes, costs follow from who
// owns what, and from the steps of a ring or a tree.
#pragma once

#include <utility>
#include <vector>

#include "core/algorithms/coded.h"
#include "core/algorithms/dissemination.h"
#include "core/algorithms/run.h"
#include "core/algorithms/select.h"
#include "core/algorithms/topk_exchange.h"
#include "core/codecs/topk.h"
#include "core/nodes.h"

namespace pycomm {

// A rank that operations are counted for, and what their costs depend on.
struct CostRank {
  int rank;
  int size;
  std::int64_t slot_bytes;    // of a staging slot
  std::int64_t packet_bytes;  // the largest tensor that travels in packets
  bool zero_copy;             // all ranks' tensors lie in their windows
};

// Bytes of n elements that begin at a block. A codec of none or of blocks.
PYCOMM_HD constexpr std::int64_t bytes_on_wire(const Operation& operation, std::int64_t n) {
  const Codec& codec = operation.codec;
  if (codec.kind == CodecKind::none) return n * size_of(operation.dtype);
  return is_scaled(codec) ? int8_bytes(n, codec.block) : n * payload_size(codec);
}

template <bool coded>
class CountingComm {
 public:
  static constexpr bool kCoded = coded;

  CountingComm(const Operation& operation, const CostRank& rank)
      : operation_(operation),
        rank_(rank),
        element_size_(size_of(operation.dtype)),
        staging_(CodedStaging::in(rank.slot_bytes * kStagingSlots, operation.codec)),
        by_rank_(static_cast<std::size_t>(rank.size)) {}

  int rank() const { return rank_.rank; }
  int size() const { return rank_.size; }
  int root() const { return operation_.root; }
  std::int64_t count() const { return operation_.count; }
  std::int64_t block() const { return operation_.count; }
  std::int64_t elements(std::int64_t bytes) const {
    const std::int64_t n = bytes / element_size_;
    return coded ? n / kLargestBlock * kLargestBlock : n;
  }
  std::int64_t line() const { return coded ? staging_.block : kLine / element_size_; }
  bool zero_copy() const { return !coded && rank_.zero_copy && allows_zero_copy(operation_); }
  Location input() const { return tensor(rank()); }
  Location output() const { return tensor(rank()); }
  Location input(int r) const { return tensor(r); }
  Location output(int r) const { return tensor(r); }
  Location slot(int r, std::int64_t) const { return {nullptr, r, 0}; }
  std::int64_t slot_count() const {
    return coded ? staging_.slot : rank_.slot_bytes / element_size_;
  }
  Location at(Location location, std::int64_t) const { return location; }
  CyclicChunks<CountingComm> chunks() {
    return {*this, first_element(operation_), staging_.piece(size())};
  }

  void announce() {}
  void publish() {}
  void await_announcements() {}
  void signal(int) { ++traffic_.steps; }
  void wait(int, int, std::int64_t) {}
  void wait_all(int, std::int64_t) {}

  void copy(Location to, Location from, std::int64_t n) {
    read(from, n);
    write(to, n);
  }
  template <class To, class From>
  void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool) {
    for (int i = 0; i < n_from; ++i) read(from(i), n);
    for (int i = 0; i < n_to; ++i) write(to(i), n);
  }
  template <class To, class From>
  void reduce_in_switch(To to, From from, std::int64_t n) {
    reduce(size(), to, size(), from, n, true);
  }

  bool fits_packets() const { return count() * element_size_ <= rank_.packet_bytes; }
  void put_packets(Location) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) with(r).sent += 2 * round_up(count() * element_size_, 4);
    }
  }
  void take_packets() {}
  Location taken(int) const { return tensor(rank()); }

  Traffic traffic() const {
    Traffic traffic = traffic_;
    for (const LinkTraffic& bytes : by_rank_) {
      traffic.bytes_in += bytes.received;
      traffic.bytes_out += bytes.sent;
    }
    return traffic;
  }
  // Bytes that this rank writes to each other rank's memory, and reads from it.
  const std::vector<LinkTraffic>& by_rank() const { return by_rank_; }

 private:
  static Location tensor(int r) { return {nullptr, r}; }
  LinkTraffic& with(int r) { return by_rank_[static_cast<std::size_t>(r)]; }
  void read(Location from, std::int64_t n) {
    if (from.rank != rank()) with(from.rank).received += bytes_on_wire(operation_, n);
  }
  void write(Location to, std::int64_t n) {
    if (to.rank != rank()) with(to.rank).sent += bytes_on_wire(operation_, n);
  }

  const Operation operation_;
  const CostRank rank_;
  const std::int64_t element_size_;
  const CodedStaging staging_;
  Traffic traffic_;  // only steps
  std::vector<LinkTraffic> by_rank_;
};

static_assert(MulticastExecutor<CountingComm<false>> && PacketExecutor<CountingComm<false>>);
static_assert(Executor<CountingComm<true>>);

// Lists that are as long as they can be.
class CountingListComm {
 public:
  CountingListComm(const Operation& operation, int rank, int size)
      : area_(operation, size), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const { return area_.ranks; }
  void announce() {}
  void signal(int) { ++traffic_.steps; }
  void wait_all(int, std::int64_t) {}
  void stage(int) {}
  void reduce() { traffic_.bytes_in += (size() - 1) * area_.list_bytes(rank_, false); }
  void gather(int owner) {
    if (owner != rank_) traffic_.bytes_in += area_.list_bytes(owner, true);
  }

  const Traffic& traffic() const { return traffic_; }

 private:
  const TopkArea area_;
  const int rank_;
  Traffic traffic_;
};

static_assert(ListExecutor<CountingListComm>);

// The counts of one node's executor. Top-k's lists depend on the data, so for top-k this is an upper
// bound. A group of one moves nothing.
inline Traffic cost_of(Operation operation, const CostRank& rank) {
  operation.algorithm = resolve(operation, rank.size);
  if (operation.codec.kind == CodecKind::topk) {
    CountingListComm comm(operation, rank.rank, rank.size);
    topk_exchange(comm);
    return comm.traffic();
  }
  if (operation.codec.kind != CodecKind::none) {
    CountingComm<true> comm(operation, rank);
    run_coded(comm, operation);
    return comm.traffic();
  }
  CountingComm<false> comm(operation, rank);
  if (rank.size > 1) run(comm, operation);
  return comm.traffic();
}

// With whom a rank exchanges, and how much, in an uncompressed operation of one node's executor.
inline std::vector<LinkTraffic> cost_by_rank(Operation operation, const CostRank& rank) {
  operation.algorithm = resolve(operation, rank.size);
  CountingComm<false> comm(operation, rank);
  if (rank.size > 1) run(comm, operation);
  return comm.by_rank();
}

// The most bytes that a rank reads from its peers in one compressed two-shot all-reduce of n elements.
inline std::int64_t wire_bytes(const Codec& codec, std::int64_t n, int ranks) {
  Operation operation{Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, n};
  operation.codec = codec;
  // Staging for whole stretches of every owner. Nobody owns more than who owns the first elements.
  const std::int64_t slot_bytes = 2 * ranks * kOwnedElements * size_of(DType::f32);
  return cost_of(operation, {0, ranks, slot_bytes, 0, false}).bytes_in;
}

namespace detail {

// Bytes that every node sends to the owner of a share, and that the owner sends to all.
struct WireShare {
  std::int64_t contribution;
  std::int64_t result;
};

inline std::vector<WireShare> wire_shares(const Operation& operation, const Nodes& nodes,
                                          int stripe) {
  std::vector<WireShare> shares;
  if (operation.codec.kind == CodecKind::topk) {
    const TopkArea area(carried_by(operation, nodes, stripe), nodes.count());
    for (int m = 0; m < nodes.count(); ++m) {
      shares.push_back({area.list_bytes(m, false), area.list_bytes(m, true)});
    }
  } else if (operation.codec.kind != CodecKind::none &&
             operation.collective == Collective::all_reduce) {
    const Operation carried = carried_by(operation, nodes, stripe);
    const StripeInterleave owners{kOwnedElements, nodes.count()};
    const std::int64_t first = first_element(carried);
    for (int m = 0; m < nodes.count(); ++m) {
      const std::int64_t n = owners.before(first + carried.count, m) - owners.before(first, m);
      shares.push_back({bytes_on_wire(carried, n), bytes_on_wire(carried, n)});
    }
  } else {
    for (const Range& owned : owned_by_nodes(operation, nodes, stripe)) {
      shares.push_back(
          {bytes_on_wire(operation, owned.count), bytes_on_wire(operation, owned.count)});
    }
  }
  return shares;
}

}  // namespace detail

// What a rank sends to each node and receives from it.
using ByNode = std::vector<LinkTraffic>;

// A rank sends blocks to ranks of other nodes itself.
inline ByNode link_cost_of_blocks(const Operation& operation, const Nodes& nodes, int index) {
  ByNode traffic(static_cast<std::size_t>(nodes.count()));
  const std::int64_t block = bytes_on_wire(operation, operation.count);
  const int rank = nodes.rank(nodes.here, index), root = operation.root;
  for (int m = 0; m < nodes.count(); ++m) {
    if (m == nodes.here) continue;
    LinkTraffic& with = traffic[static_cast<std::size_t>(m)];
    if (operation.collective == Collective::all_to_all) {
      with = {nodes.size(m) * block, nodes.size(m) * block};
      continue;
    }
    with = {m == nodes.node_of(root) ? block : 0, rank == root ? nodes.size(m) * block : 0};
    if (operation.collective == Collective::scatter) std::swap(with.sent, with.received);
  }
  return traffic;
}

// A ring's or a tree's.
inline ByNode link_cost_of_relay(const Operation& operation, const Nodes& nodes, int stripe) {
  const bool plain = operation.codec.kind == CodecKind::none;
  const Operation carried = plain ? operation : carried_by(operation, nodes, stripe);
  const std::int64_t count =
      plain ? stripe_of(operation, nodes, stripe, 0, operation.count).count : carried.count;
  ByNode traffic(static_cast<std::size_t>(nodes.count()));
  visit_steps(operation.algorithm, relayed(carried, nodes, count), [&](const auto& steps) {
    for (std::int64_t i = 0; i < steps.count(); ++i) {
      const RelayStep step = steps[i];
      const std::int64_t bytes = bytes_on_wire(carried, step.piece.count);
      for (int j = 0; j < 2; ++j) {
        if (step.to[j] >= 0) traffic[static_cast<std::size_t>(step.to[j])].sent += bytes;
        if (step.from[j] >= 0) traffic[static_cast<std::size_t>(step.from[j])].received += bytes;
      }
    }
  });
  return traffic;
}

// That of a whole stripe among many nodes.
inline ByNode link_cost_of_rounds(const Operation& operation, const Nodes& nodes, int stripe) {
  ByNode traffic(static_cast<std::size_t>(nodes.count()));
  const std::int64_t bytes =
      bytes_on_wire(operation, stripe_of(operation, nodes, stripe, 0, operation.count).count);
  for (int held = 1; held < nodes.count(); held *= kRadix) {
    for (int i = 1; i < kRadix; ++i) {
      const BlockMessage message = message_at(i, held, nodes.here, nodes.count());
      traffic[static_cast<std::size_t>(message.to)].sent += message.blocks * bytes;
      traffic[static_cast<std::size_t>(message.from)].received += message.blocks * bytes;
    }
  }
  return traffic;
}

// The bytes that the rank with this stripe on node `nodes.here` sends to each other node and receives
// from it, without handshakes and the lengths of lists. For top-k, an upper bound.
inline ByNode link_cost_by_node(const Operation& operation, const Nodes& nodes, int stripe) {
  if (moves_blocks(operation.collective)) return link_cost_of_blocks(operation, nodes, stripe);
  ByNode traffic(static_cast<std::size_t>(nodes.count()));
  if (stripe >= nodes.stripes() || operation.collective == Collective::barrier) return traffic;
  if (relays(operation.algorithm)) return link_cost_of_relay(operation, nodes, stripe);
  if (travels_in_rounds(operation, nodes, stripe)) {
    return link_cost_of_rounds(operation, nodes, stripe);
  }
  const bool reduces = pycomm::reduces(operation.collective);
  const auto gets_result = [&](int node) {
    return operation.collective != Collective::reduce || node == nodes.node_of(operation.root);
  };
  const bool gathers =
      operation.collective != Collective::reduce_scatter &&
      (operation.codec.kind != CodecKind::none || !adds_everywhere(operation, nodes, stripe));
  const std::vector<detail::WireShare> shares = detail::wire_shares(operation, nodes, stripe);
  for (int m = 0; m < nodes.count(); ++m) {
    if (m == nodes.here) continue;
    const auto& mine = shares[static_cast<std::size_t>(nodes.here)];
    const auto& theirs = shares[static_cast<std::size_t>(m)];
    LinkTraffic& with = traffic[static_cast<std::size_t>(m)];
    with.sent += reduces ? theirs.contribution : 0;
    with.sent += gathers && gets_result(m) ? mine.result : 0;
    with.received += reduces ? mine.contribution : 0;
    with.received += gathers && gets_result(nodes.here) ? theirs.result : 0;
  }
  return traffic;
}

// The same with all nodes together.
inline LinkTraffic link_cost(const Operation& operation, const Nodes& nodes, int stripe) {
  LinkTraffic total;
  for (const LinkTraffic& with : link_cost_by_node(operation, nodes, stripe)) {
    total.sent += with.sent;
    total.received += with.received;
  }
  return total;
}

// The messages that a node sends in an all-reduce of stripes that are sent whole, handshakes included,
// and how many messages follow one another.
struct MessageCount {
  int sent;
  int in_sequence;
};

namespace detail {

// The link and the blocks of a dissemination that only counts.
struct CountingRounds {
  int nodes;
  MessageCount counted;

  int size() const { return nodes; }
  int transfers(int held) const {
    int messages = 0;
    while (messages + 1 < kRadix && message_at(messages + 1, held, 0, nodes).blocks > 0) ++messages;
    return messages;
  }
  int post(int messages) {
    counted.sent += messages;
    return ++counted.in_sequence;
  }
  void wait(int, int) {}
};

}  // namespace detail

inline MessageCount messages_of_whole_stripe(int nodes) {
  if (nodes <= kMostNodesSentTo) return {2 * (nodes - 1), 1};
  detail::CountingRounds rounds{nodes, {1, 0}};  // a handshake to one neighbour
  disseminate(rounds, rounds);
  return rounds.counted;
}

}  // namespace pycomm

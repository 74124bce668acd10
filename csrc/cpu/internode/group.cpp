#include "cpu/internode/group.h"

#include "core/algorithms/run.h"
#include "core/codecs/cast.h"
#include "cpu/loops.h"

namespace pycomm::cpu {
namespace {

void move(void* to, const void* from, std::int64_t bytes) {
  if (to == from || bytes == 0) return;
  copy({static_cast<std::byte*>(to), false}, static_cast<const std::byte*>(from), bytes);
}

}  // namespace

InternodeGroup::InternodeGroup(Comm& comm, Nodes nodes, std::shared_ptr<Transport> transport,
                               Clock::duration timeout)
    : comm_(comm), nodes_(std::move(nodes)), topk_(nullptr) {
  if (transport != nullptr) {
    link_ = std::make_unique<Link>(comm, std::move(transport), nodes_, timeout);
  }
}

bool InternodeGroup::run(const Operation& operation, const Call& call, void (*interrupt)()) {
  begin(operation, interrupt);
  if (operation.codec.kind != CodecKind::none) return compressed(operation, call);
  if (owns_stripe()) link_->publish();
  switch (operation.collective) {
    case Collective::all_reduce:
      all_reduce(operation, call);
      break;
    case Collective::reduce_scatter:
      reduce_scatter(operation, call);
      break;
    case Collective::all_gather:
      all_gather(operation, call);
      break;
    case Collective::broadcast:
      broadcast(operation, call);
      break;
    case Collective::barrier:
      barrier(operation);
      break;
    default:  // refused by Group
      break;
  }
  return false;
}

// The ranks of this node announce the operation to each other.
void InternodeGroup::begin(const Operation& operation, void (*interrupt)()) {
  comm_.begin(operation, nullptr, nullptr, interrupt);
  comm_.announce();
  if (owns_stripe()) link_->begin(interrupt);
}

// An operation among the ranks of this node, on `count` elements.
Operation InternodeGroup::phase(const Operation& operation, std::int64_t count) const {
  Operation phase = operation;
  phase.collective = Collective::all_reduce;
  phase.algorithm = Algorithm::two_shot;
  phase.codec = {};
  phase.count = count;
  return phase;
}

// Writes the node's sum of this rank's stripe to its place in the output.
void InternodeGroup::reduce_to_stripes(const Operation& operation, std::int64_t count,
                                       const void* input, void* output) {
  if (comm_.size() == 1) return move(output, input, count * size_of(operation.dtype));
  comm_.begin_phase(phase(operation, count), input, output);
  pycomm::reduce_scatter(comm_, EvenStripes<Comm>{comm_, nodes_.stripes()}, false);
  comm_.leave_peers_heaps();  // the exchange between nodes can take long
}

void InternodeGroup::gather_stripes(const Operation& operation, std::int64_t count, void* data) {
  if (comm_.size() == 1) return;
  comm_.begin_phase(phase(operation, count), data, data);
  pycomm::all_gather(comm_, EvenStripes<Comm>{comm_, nodes_.stripes()});
}

void InternodeGroup::exchange_plain(const Operation& operation, std::byte* data, bool reduces,
                                    bool gathers) {
  if (!owns_stripe()) return;
  link_->await_announcements();
  PlainStages stages(*link_, operation,
                     {data, owned_by_nodes(operation, nodes_, comm_.rank()), reduces, gathers},
                     scratch_.incoming);
  exchange(*link_, stages);
}

void InternodeGroup::all_reduce(const Operation& operation, const Call& call) {
  reduce_to_stripes(operation, operation.count, call.input, call.output);
  exchange_plain(operation, static_cast<std::byte*>(call.output), true, true);
  gather_stripes(operation, operation.count, call.output);
}

// Reorders blocks between rank order, as callers see them, and node order, in which they are
// exchanged. Needed if the ranks of nodes are not consecutive.
const std::byte* InternodeGroup::in_node_order(const void* blocks, std::int64_t bytes,
                                               bool from_rank_order, std::byte* to) const {
  const auto* from = static_cast<const std::byte*>(blocks);
  std::int64_t place = 0;
  for (const auto& node : nodes_.ranks) {
    for (const int rank : node) {
      const std::int64_t by_rank = rank * bytes, by_node = place++ * bytes;
      move(to + (from_rank_order ? by_node : by_rank), from + (from_rank_order ? by_rank : by_node),
           bytes);
    }
  }
  return to;
}

void InternodeGroup::reduce_scatter(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count, element = size_of(operation.dtype);
  const auto* input = static_cast<const std::byte*>(call.input);
  if (!nodes_.in_order()) {
    input = in_node_order(input, block * element, true,
                          scratch_.blocks.bytes(nodes_.world() * block * element));
  }
  std::byte* const sums = scratch_.sums.bytes(nodes_.world() * block * element);
  for (int m = 0; m < nodes_.count(); ++m) {
    const std::int64_t begin = segment(m, block) * element;
    reduce_to_stripes(operation, nodes_.size(m) * block, input + begin, sums + begin);
  }
  exchange_plain(operation, sums, true, false);
  std::byte* const here = sums + segment(nodes_.here, block) * element;
  gather_stripes(operation, nodes_.size(nodes_.here) * block, here);
  move(call.output, here + comm_.rank() * block * element, block * element);
}

void InternodeGroup::all_gather(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count, element = size_of(operation.dtype);
  const bool in_order = nodes_.in_order();
  std::byte* const all = in_order ? static_cast<std::byte*>(call.output)
                                  : scratch_.blocks.bytes(nodes_.world() * block * element);
  std::byte* const here = all + segment(nodes_.here, block) * element;
  if (comm_.size() == 1) {
    move(here, call.input, block * element);
  } else {
    comm_.begin_phase(operation, call.input, here);
    pycomm::all_gather(comm_);
  }
  exchange_plain(operation, all, false, true);
  for (int m = 0; m < nodes_.count(); ++m) {
    if (m == nodes_.here) continue;
    gather_stripes(operation, nodes_.size(m) * block, all + segment(m, block) * element);
  }
  if (!in_order) {
    in_node_order(all, block * element, false, static_cast<std::byte*>(call.output));
  }
}

void InternodeGroup::broadcast(const Operation& operation, const Call& call) {
  const bool from_here = nodes_.node_of(operation.root) == nodes_.here;
  if (from_here) {
    Operation inside = operation;
    const std::vector<int>& here = nodes_.at(nodes_.here);
    inside.root =
        static_cast<int>(std::find(here.begin(), here.end(), operation.root) - here.begin());
    comm_.begin_phase(inside, call.input, call.output);
    if (comm_.size() > 1) pycomm::broadcast(comm_);
  }
  exchange_plain(operation, static_cast<std::byte*>(call.output), false, true);
  if (!from_here) gather_stripes(operation, operation.count, call.output);
}

void InternodeGroup::trim() {
  topk_.trim(comm_.sequence());
  aggregate_memory_ = {};
  scratch_ = {};
  if (owns_stripe()) link_->trim();
}

void InternodeGroup::barrier(const Operation& operation) {
  if (owns_stripe()) link_->await_announcements();
  comm_.begin_phase(operation, nullptr, nullptr);
  comm_.announce();
}

bool InternodeGroup::compressed(const Operation& operation, const Call& call) {
  if (!nodes_.single()) return compressed_sum(operation, call);
  const float largest = bit_cast<float>(largest_finite(operation.dtype));
  return exchange_coded(operation, call, largest, nullptr).nonfinite != 0;
}

bool InternodeGroup::compressed_sum(const Operation& operation, const Call& call) {
  NodeAggregate aggregate(comm_, nodes_, aggregate_memory_, operation, call);
  aggregate.collect_first();
  const float ranks_per_node =
      static_cast<float>(nodes_.world()) / static_cast<float>(nodes_.count());
  const float largest = bit_cast<float>(largest_finite(operation.dtype)) *
                        (operation.op == ReduceOp::avg ? ranks_per_node : 1.0f);
  const Preflight preflight =
      exchange_coded(aggregate.carried(), aggregate.call(), largest, &aggregate);
  if (preflight.overflow == 0 && preflight.unused == 0) aggregate.store_feedback();
  return preflight.nonfinite != 0;
}

// The preflight before anything is sent. With an aggregate, all ranks of this node agree on it.
Preflight InternodeGroup::agree(Preflight mine, const NodeAggregate* aggregate) {
  if (aggregate == nullptr) return mine;
  comm_.begin_phase(comm_.called(), nullptr, nullptr, mine);
  comm_.announce();
  return comm_.preflight();
}

// Runs the exchange between nodes. With an aggregate, also collects from this node's ranks and
// spreads to them.
template <class Coded, class Stages>
Preflight InternodeGroup::exchange_parts(const Coded& coded, Stages stages,
                                         NodeAggregate* aggregate) {
  const auto finding = [&coded] {
    Preflight found = coded.preflight();
    found.nonfinite = static_cast<std::uint8_t>(coded.nonfinite());
    return found;
  };
  if (aggregate == nullptr) {
    exchange(*link_, stages);
    return finding();
  }
  AggregateStages aggregate_stages(*aggregate, stages, finding);
  exchange(*link_, aggregate_stages);
  return aggregate_stages.preflight();
}

// `aggregate` is null if the tensor is not one.
Preflight InternodeGroup::exchange_coded(const Operation& operation, const Call& call,
                                         float largest_result, NodeAggregate* aggregate) {
  if (!owns_stripe()) {
    agree(kNeutralPreflight, aggregate);
    NoStages nothing;
    NoLink nowhere;
    AggregateStages aggregate_stages(*aggregate, nothing, [] { return kNeutralPreflight; });
    exchange(nowhere, aggregate_stages);
    return aggregate_stages.preflight();
  }
  const float limit = largest_safe(operation, nodes_.count(), largest_result);
  if (operation.codec.kind == CodecKind::topk) {
    TopkComm<Link> coded(*link_, topk_, operation, call, limit);
    link_->begin_tensor(operation, call.input, call.output, agree(coded.preflight(), aggregate));
    coded.announce();
    return exchange_parts(coded, ListStages(*link_, coded, list_lengths_), aggregate);
  }
  const Preflight preflight = agree(preflight_of(operation, call, limit), aggregate);
  link_->begin_tensor(operation, call.input, call.output, preflight);
  const TileRanges tile_ranges =
      aggregate != nullptr
          ? aggregate->tile_ranges()
          : tile_ranges_of(operation, {nodes_.count() * kOwnedElements, 1}, nodes_.count());
  CodedComm<Link> coded(*link_, operation, call.feedback, limit,
                        BlockStages::staging(operation.codec, tile_ranges),
                        codec_loops(operation.dtype, operation.codec));
  coded.announce();
  return exchange_parts(
      coded, BlockStages(*link_, coded, operation, tile_ranges, scratch_.incoming), aggregate);
}

}  // namespace pycomm::cpu

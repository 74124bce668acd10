#include "cpu/internode/group.h"

#include "core/algorithms/run.h"
#include "core/codecs/cast.h"
#include "cpu/executor/loops.h"

namespace pycomm::cpu {

void InternodeGroup::move_bytes(void* to, const void* from, std::int64_t bytes) {
  if (to == from || bytes == 0) return;
  copy({static_cast<std::byte*>(to), false}, static_cast<const std::byte*>(from), bytes);
}

InternodeGroup::InternodeGroup(Comm& comm, Nodes nodes, std::shared_ptr<Transport> transport,
                               Clock::duration timeout)
    : comm_(comm), nodes_(std::move(nodes)), topk_(nullptr) {
  if (transport != nullptr) {
    link_ = std::make_unique<Link>(comm, std::move(transport), nodes_, timeout);
  }
}

bool InternodeGroup::run(const Operation& operation, const Call& call, void (*interrupt)(),
                         p2p::Engine* engine) {
  traffic_ = {};
  begin(operation, interrupt);
  bool nonfinite = false;
  if (operation.codec.kind != CodecKind::none) {
    nonfinite = compressed(operation, call);
  } else {
    if (owns_stripe()) link_->publish(!disseminates(operation));
    run_plain(operation, call, engine, interrupt);
  }
  if (owns_stripe()) {
    traffic_.sent += link_->traffic().sent;
    traffic_.received += link_->traffic().received;
  }
  return nonfinite;
}

void InternodeGroup::run_plain(const Operation& operation, const Call& call, p2p::Engine* engine,
                               void (*interrupt)()) {
  if (moves_blocks(operation.collective)) return move_blocks(operation, call, *engine, interrupt);
  if (call.inputs || call.outputs) return in_equal_blocks(operation, call);
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
    case Collective::reduce:
      reduce(operation, call);
      break;
    default:  // has run in another way
      break;
  }
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
  if (comm_.size() == 1) return move_bytes(output, input, count * size_of(operation.dtype));
  comm_.begin_phase(phase(operation, count), input, output);
  pycomm::reduce_scatter(comm_, EvenStripes<Comm>{comm_, nodes_.stripes(), stripe_unit(operation)},
                         false);
  comm_.leave_peers_heaps();  // the exchange between nodes can take long
}

// Returns the combination of this node's preflights.
Preflight InternodeGroup::gather_stripes(const Operation& operation, std::int64_t count, void* data,
                                         Preflight mine) {
  if (comm_.size() == 1) return mine;
  comm_.begin_phase(phase(operation, count), data, data, mine);
  pycomm::all_gather(comm_, EvenStripes<Comm>{comm_, nodes_.stripes(), stripe_unit(operation)});
  return comm_.preflight();
}

void InternodeGroup::exchange_plain(const Operation& operation, std::byte* data, bool reduces,
                                    bool gathers, int to) {
  if (!owns_stripe()) return;
  gathers = gathers && !adds_everywhere(operation, nodes_, comm_.rank());
  PlainStages stages(*link_, operation,
                     {data, owned_by_nodes(operation, nodes_, comm_.rank()), reduces, gathers, to},
                     scratch_.incoming);
  exchange(*link_, stages);
  link_->await_announcements();  // if no data was exchanged
}

// All-reduce by a ring or a tree of nodes.
void InternodeGroup::relay_plain(const Operation& operation, std::byte* data) {
  if (!owns_stripe()) return;
  const Range mine = stripe_of(operation, nodes_, comm_.rank(), 0, operation.count);
  std::byte* const stripe = data + mine.begin * size_of(operation.dtype);
  visit_steps(operation.algorithm, relayed(operation, nodes_, mine.count), [&](const auto& steps) {
    PlainPieces pieces(*link_, operation, stripe, steps.piece(), scratch_.incoming);
    relay(*link_, steps, pieces);
  });
  link_->await_announcements();  // if no data was exchanged
}

// All-reduce of a small stripe among many nodes.
void InternodeGroup::disseminate_plain(const Operation& operation, std::byte* data) {
  const Range mine = stripe_of(operation, nodes_, comm_.rank(), 0, operation.count);
  WholeStripes stripes(*link_, operation, data + mine.begin * size_of(operation.dtype), mine.count,
                       scratch_.incoming);
  disseminate(*link_, stripes);
  stripes.reduce();
}

void InternodeGroup::all_reduce(const Operation& operation, const Call& call) {
  auto* const data = static_cast<std::byte*>(call.output);
  reduce_to_stripes(operation, operation.count, call.input, data);
  if (relays(operation.algorithm)) {
    relay_plain(operation, data);
  } else if (disseminates(operation)) {
    disseminate_plain(operation, data);
  } else {
    exchange_plain(operation, data, true, true);
  }
  gather_stripes(operation, operation.count, data);
}

// The ranks without a result have the sums of their stripes in a buffer.
void InternodeGroup::reduce(const Operation& operation, const Call& call) {
  const int to = nodes_.node_of(operation.root);
  std::byte* const sums = nodes_.rank(nodes_.here, comm_.rank()) == operation.root
                              ? static_cast<std::byte*>(call.output)
                              : scratch_.sums.bytes(operation.count * size_of(operation.dtype));
  reduce_to_stripes(operation, operation.count, call.input, sums);
  exchange_plain(operation, sums, true, true, to);
  if (to == nodes_.here) gather_stripes(operation, operation.count, sums);
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
      move_bytes(to + (from_rank_order ? by_node : by_rank),
                 from + (from_rank_order ? by_rank : by_node), bytes);
    }
  }
  return to;
}

// Blocks in node order: the caller's, or a copy of them.
const std::byte* InternodeGroup::in_node_order(const void* blocks, std::int64_t bytes) {
  if (nodes_.in_order()) return static_cast<const std::byte*>(blocks);
  return in_node_order(blocks, bytes, true, scratch_.blocks.bytes(nodes_.world() * bytes));
}

void InternodeGroup::reduce_scatter(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count, element = size_of(operation.dtype);
  const std::byte* const input = in_node_order(call.input, block * element);
  std::byte* const sums = scratch_.sums.bytes(nodes_.world() * block * element);
  for (int m = 0; m < nodes_.count(); ++m) {
    const std::int64_t begin = begin_of_blocks(m, block) * element;
    reduce_to_stripes(operation, nodes_.size(m) * block, input + begin, sums + begin);
  }
  exchange_plain(operation, sums, true, false);
  std::byte* const here = sums + begin_of_blocks(nodes_.here, block) * element;
  gather_stripes(operation, nodes_.size(nodes_.here) * block, here);
  move_bytes(call.output, here + comm_.rank() * block * element, block * element);
}

void InternodeGroup::all_gather(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count, element = size_of(operation.dtype);
  const bool in_order = nodes_.in_order();
  std::byte* const all = in_order ? static_cast<std::byte*>(call.output)
                                  : scratch_.blocks.bytes(nodes_.world() * block * element);
  std::byte* const here = all + begin_of_blocks(nodes_.here, block) * element;
  if (comm_.size() == 1) {
    move_bytes(here, call.input, block * element);
  } else {
    comm_.begin_phase(operation, call.input, here);
    pycomm::all_gather(comm_);
  }
  exchange_plain(operation, all, false, true);
  for (int m = 0; m < nodes_.count(); ++m) {
    if (m == nodes_.here) continue;
    gather_stripes(operation, nodes_.size(m) * block, all + begin_of_blocks(m, block) * element);
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

std::vector<NodeState> InternodeGroup::other_nodes() {
  std::vector<NodeState> others;
  for (int m = 0; m < nodes_.count(); ++m) {
    if (m == nodes_.here) continue;
    NodeState state{m, nodes_.at(m), -1, false, false, {}};
    if (link_ != nullptr) link_->describe(state);
    others.push_back(std::move(state));
  }
  return others;
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
  if (operation.collective == Collective::reduce_scatter) {
    return compressed_reduce_scatter(operation, call);
  }
  if (!nodes_.single()) return compressed_sum(operation, call);
  return exchange_coded(operation, call, largest_result(operation), nullptr).nonfinite != 0;
}

float InternodeGroup::largest_result(const Operation& operation) const {
  return pycomm::largest_result(operation.dtype, operation.op, nodes_.count(), nodes_.world());
}

bool InternodeGroup::compressed_sum(const Operation& operation, const Call& call) {
  NodeAggregate aggregate(comm_, nodes_, aggregate_memory_, operation, call);
  aggregate.collect_first();
  const Preflight preflight =
      exchange_coded(aggregate.carried(), aggregate.call(), largest_result(operation), &aggregate);
  if (preflight.overflow == 0 && preflight.unused == 0) aggregate.store_feedback();
  return preflight.nonfinite != 0;
}

// The preflight of this node's ranks, before anything is sent.
Preflight InternodeGroup::agree(Preflight mine) {
  if (comm_.size() == 1) return mine;
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
    agree(kNeutralPreflight);
    NoStages nothing;
    NoLink nowhere;
    AggregateStages aggregate_stages(*aggregate, nothing, [] { return kNeutralPreflight; });
    exchange(nowhere, aggregate_stages);
    return aggregate_stages.preflight();
  }
  const float limit = largest_safe(operation, nodes_.count(), largest_result);
  if (operation.codec.kind == CodecKind::topk) {
    TopkComm<Link> coded(*link_, topk_, operation, call, limit);
    link_->begin_tensor(operation, call.input, call.output, agree(coded.preflight()));
    coded.announce();
    return exchange_parts(coded, ListStages(*link_, coded, list_lengths_), aggregate);
  }
  const Range whole{0, operation.count};
  const Preflight preflight = agree(preflight_of(operation, call, limit, {&whole, 1}));
  link_->begin_tensor(operation, call.input, call.output, preflight);
  if (relays(operation.algorithm)) return relay_coded(operation, call, limit, aggregate);
  const TileRanges tile_ranges =
      aggregate != nullptr
          ? aggregate->tile_ranges()
          : tile_ranges_of(operation, {nodes_.count() * kOwnedElements, 1}, nodes_.count());
  const CyclicOwners owners(*link_, operation, tile_ranges);
  const EncodedAreas layout(operation.codec, owners.elements());
  CodedComm<Link> coded(*link_, operation, call.feedback, limit, layout.staging,
                        codec_loops(operation.dtype, operation.codec));
  coded.announce();
  return exchange_parts(coded, BlockStages(*link_, coded, layout, owners, scratch_.incoming),
                        aggregate);
}

Preflight InternodeGroup::relay_coded(const Operation& operation, const Call& call, float limit,
                                      NodeAggregate* aggregate) {
  Preflight found;
  const RelayTensor tensor = relayed(operation, nodes_, operation.count);
  visit_steps(operation.algorithm, tensor, [&](const auto& steps) {
    const EncodedAreas layout(operation.codec, steps.piece());
    CodedComm<Link> coded(*link_, operation, call.feedback, limit, layout.staging,
                          codec_loops(operation.dtype, operation.codec));
    coded.announce();
    CodedPieces pieces(*link_, coded, layout, steps.pieces(), scratch_.incoming);
    found = exchange_parts(coded, RelayStages(*link_, steps, pieces), aggregate);
  });
  return found;
}

// Every rank sends each node its part of the sums, in one stripe, and its node gathers the results.
bool InternodeGroup::compressed_reduce_scatter(const Operation& operation, const Call& call) {
  if (nodes_.single()) {
    const float largest = largest_result(operation);
    return tell_nodes(call, exchange_blocks(operation, call, largest)).nonfinite != 0;
  }
  const std::int64_t block = operation.count, bytes = block * size_of(operation.dtype);
  const int ranks = nodes_.size(nodes_.here);
  float* const sums = sum_blocks(operation, call.input);
  std::byte* const here =
      operation.dtype == DType::f32
          ? reinterpret_cast<std::byte*>(sums + begin_of_blocks(nodes_.here, block))
          : scratch_.blocks.bytes(ranks * bytes);
  Preflight found = kNeutralPreflight;
  if (owns_stripe()) {
    found = exchange_sums(operation, call, sums, here);
  } else {
    agree(kNeutralPreflight);
  }
  found = gather_stripes(operation, ranks * block, here, found);
  move_bytes(call.output, here + comm_.rank() * bytes, bytes);
  return found.nonfinite != 0;
}

// This node's fp32 sums of all blocks, in node order. A rank has the sums of its stripe of each
// node's blocks.
float* InternodeGroup::sum_blocks(const Operation& operation, const void* input) {
  const std::int64_t block = operation.count, n = nodes_.world() * block;
  const float* const wide =
      widened(operation.dtype, in_node_order(input, block * size_of(operation.dtype)), n,
              aggregate_memory_.wide);
  float* const sums = scratch_.sums.floats(n);
  Operation sum = operation;
  sum.dtype = DType::f32;
  for (int m = 0; m < nodes_.count(); ++m) {
    const std::int64_t begin = begin_of_blocks(m, block);
    reduce_to_stripes(sum, nodes_.size(m) * block, wide + begin, sums + begin);
  }
  return sums;
}

// The part between nodes. Writes this rank's stripe of the result to `here`, the place of this
// node's blocks in the tensor's type.
Preflight InternodeGroup::exchange_sums(const Operation& operation, const Call& call, float* sums,
                                        std::byte* here) {
  const std::int64_t block = operation.count, first = begin_of_blocks(nodes_.here, block);
  const Range mine =
      stripe_of(operation, nodes_, comm_.rank(), first, nodes_.size(nodes_.here) * block);
  Operation carried = operation;
  carried.dtype = DType::f32;
  Call carried_call = call;
  carried_call.input = sums;
  carried_call.output = sums + mine.begin;
  float* const residual = call.feedback.residual;
  const std::int64_t residual_bytes = block * size_of(DType::f32);
  const bool reorders = residual != nullptr && !nodes_.in_order();
  if (reorders) {
    float* const ordered = aggregate_memory_.residual.floats(nodes_.world() * block);
    in_node_order(residual, residual_bytes, true, reinterpret_cast<std::byte*>(ordered));
    carried_call.feedback.residual = ordered;
  }
  Preflight found = exchange_blocks(carried, carried_call, largest_result(operation));
  const bool keeps = residual != nullptr && found.overflow == 0 && found.unused == 0;
  float* const kept = carried_call.feedback.residual;
  if (operation.dtype != DType::f32) {
    const float divisor = operation.op == ReduceOp::avg ? static_cast<float>(nodes_.world()) : 1.0f;
    std::byte* const to = here + (mine.begin - first) * size_of(operation.dtype);
    const std::uint32_t largest = narrow_loop(operation.dtype)(
        sums + mine.begin, to, mine.count, keeps ? kept + mine.begin : nullptr,
        divisor * scaling_of(call.feedback).inverse);
    found.nonfinite |= static_cast<std::uint8_t>(largest >= kInfinityBits);
  }
  if (keeps && reorders) {
    in_node_order(kept, residual_bytes, false, reinterpret_cast<std::byte*>(residual));
  }
  return tell_nodes(call, found);
}

// Sends every node this rank's stripe of that node's blocks. The output receives this rank's stripe
// of this node's blocks.
Preflight InternodeGroup::exchange_blocks(const Operation& operation, const Call& call,
                                          float largest_result) {
  const std::vector<Range> owned = owned_by_nodes(operation, nodes_, comm_.rank());
  const float limit = largest_safe(operation, nodes_.count(), largest_result);
  const Preflight preflight = agree(preflight_of(operation, call, limit, owned));
  link_->begin_tensor(operation, call.input, call.output, preflight);
  const RangeOwners owners(owned, operation.codec);
  const EncodedAreas layout(operation.codec, owners.elements());
  CodedComm<Link> coded(*link_, operation, call.feedback, limit, layout.staging,
                        codec_loops(operation.dtype, operation.codec));
  coded.announce();
  return exchange_parts(coded, BlockStages(*link_, coded, layout, owners, scratch_.incoming),
                        nullptr);
}

// A node knows only whether its own contribution and result are finite. With feedback, the preflight
// has already told all nodes.
Preflight InternodeGroup::tell_nodes(const Call& call, Preflight found) {
  if (call.feedback.residual != nullptr) return found;
  verdicts_.assign(static_cast<std::size_t>(nodes_.count()), std::byte{found.nonfinite});
  Batch batch;
  for (int m = 0; m < nodes_.count(); ++m) {
    if (m == nodes_.here) continue;
    batch.sends.push_back({m, &verdicts_[static_cast<std::size_t>(nodes_.here)], 1});
    batch.receives.push_back({m, &verdicts_[static_cast<std::size_t>(m)], 1});
  }
  link_->wait(link_->post(batch));
  for (const std::byte verdict : verdicts_) {
    found.nonfinite |= static_cast<std::uint8_t>(verdict != std::byte{0});
  }
  return found;
}

}  // namespace pycomm::cpu

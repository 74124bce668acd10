#include "cpu/internode/blocks.h"

#include <cstring>

#include "cpu/internode/group.h"
#include "cpu/internode/transport.h"

namespace pycomm::cpu {

BlockMessages::BlockMessages(Comm& comm, const Nodes& nodes, p2p::Engine& engine,
                             const Operation& operation, const Call& call)
    : comm_(comm),
      engine_(engine),
      operation_(operation),
      call_(call),
      blocks_(call, operation, nodes.world()) {
  try {
    start(nodes.world());
  } catch (...) {
    end();
    throw;
  }
}

BlockMessages::~BlockMessages() { end(); }

bool BlockMessages::sends_to(int rank) const {
  return is(Collective::all_to_all) || (is(Collective::gather) && rank == operation_.root) ||
         (is(Collective::scatter) && self() == operation_.root);
}

bool BlockMessages::gets_from(int rank) const {
  return is(Collective::all_to_all) || (is(Collective::scatter) && rank == operation_.root) ||
         (is(Collective::gather) && self() == operation_.root);
}

std::byte* BlockMessages::source(int rank) const {
  if (!is(Collective::gather)) return blocks_.inputs.addresses[static_cast<std::size_t>(rank)];
  return static_cast<std::byte*>(const_cast<void*>(call_.input));
}

std::byte* BlockMessages::target(int rank) const {
  if (!is(Collective::scatter)) return blocks_.outputs.addresses[static_cast<std::size_t>(rank)];
  return static_cast<std::byte*>(call_.output);
}

void BlockMessages::start(int ranks) {
  const int self = this->self();
  for (int i = 1; i < ranks; ++i) {
    const int r = (self - i + ranks) % ranks;
    if (gets_from(r)) start(r, true, target(r), bytes(blocks_.outputs, r));
  }
  for (int i = 1; i < ranks; ++i) {
    const int r = (self + i) % ranks;
    if (sends_to(r)) start(r, false, source(r), bytes(blocks_.inputs, r));
  }
  const std::int64_t own = std::min(bytes(blocks_.inputs, self), bytes(blocks_.outputs, self));
  if (sends_to(self) && gets_from(self) && own > 0) {
    std::memmove(target(self), source(self), static_cast<std::size_t>(own));
  }
}

// The operation's number is the tag.
void BlockMessages::start(int rank, bool receives, std::byte* data, std::int64_t bytes) {
  if (bytes == 0) return;
  if (comm_.index_of(rank) < 0) (receives ? traffic_.received : traffic_.sent) += bytes;
  const auto tag = static_cast<std::int32_t>(comm_.ordinal());
  const p2p::Envelope envelope{rank, tag, Element::u8, bytes, p2p::Channel::collective};
  p2p::Options options;
  options.always_timed = options.waited_for = true;
  options.timeout =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(call_.timeout));
  requests_.push_back(receives ? engine_.irecv(data, envelope, options)
                               : engine_.isend(data, envelope, options));
}

// Ranks of this node that wait in a later operation learn that this one still waits for others.
void BlockMessages::wait(void (*interrupt)()) {
  try {
    for (const p2p::RequestPtr& request : requests_) {
      while (!request->wait(kLook)) {
        comm_.beat();
        if (interrupt != nullptr) interrupt();
      }
    }
  } catch (const CollectiveError&) {  // of the message; say which operation it was for
    throw comm_.failure_of(comm_.decided_word());
  }
}

void BlockMessages::end() {
  for (const p2p::RequestPtr& request : requests_) {
    if (request->completed()) continue;
    comm_.abort(Reason::aborted, comm_.rank());
    try {
      request->wait();
    } catch (const CollectiveError&) {
    }
  }
}

void InternodeGroup::move_blocks(const Operation& operation, const Call& call, p2p::Engine& engine,
                                 void (*interrupt)()) {
  BlockMessages messages(comm_, nodes_, engine, operation, call);
  barrier(operation);
  if (call.inputs.counts != nullptr) check_counts(operation, messages.blocks());
  messages.wait(interrupt);
  traffic_ = messages.traffic();
}

// In an all-to-all, a rank knows only what it sends and expects.
void InternodeGroup::check_counts(const Operation& operation, const CallBlocks& blocks) {
  const BlockCounts counts(
      nodes_.world(), blocks,
      [this](const Operation& gather, const Call& call) { all_gather(gather, call); });
  if (const auto error = counts.disagreement(comm_, operation)) fail_together(operation, *error);
}

// As on one node: no node fails before all ranks of all nodes have found the error.
void InternodeGroup::fail_together(const Operation& operation, const CollectiveError& error) {
  try {
    comm_.begin_phase(operation, nullptr, nullptr);
    comm_.announce();
    if (owns_stripe()) tell_nodes({}, {});
    cpu::fail_together(comm_, operation, error);
  } catch (const CollectiveError& other) {
    if (other.reason != error.reason) throw;
    comm_.abort(abort_word(error.reason, error.rank));  // before messages end with another reason
    throw error;
  }
}

void InternodeGroup::in_equal_blocks(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count * size_of(operation.dtype);
  const CallBlocks blocks(call, operation, nodes_.world());
  std::byte* const all = scratch_.listed.bytes((nodes_.world() + 1) * block);
  std::byte* const mine = all + nodes_.world() * block;  // this rank's own
  const int self = comm_.number(comm_.rank());
  if (operation.collective == Collective::reduce_scatter) {
    for (int r = 0; r < nodes_.world(); ++r) {
      const std::int64_t n = blocks.inputs.bytes(r, operation.dtype);
      move_bytes(all + r * block, blocks.inputs.addresses[static_cast<std::size_t>(r)], n);
      std::memset(all + r * block + n, 0, static_cast<std::size_t>(block - n));
    }
    Call equal = call;
    equal.input = all;
    equal.output = mine;
    reduce_scatter(operation, equal);
    return move_bytes(call.output, mine, blocks.inputs.bytes(self, operation.dtype));
  }
  const std::int64_t n = blocks.outputs.bytes(self, operation.dtype);
  move_bytes(mine, call.input, n);
  std::memset(mine + n, 0, static_cast<std::size_t>(block - n));
  Call equal = call;
  equal.input = mine;
  equal.output = all;
  all_gather(operation, equal);
  for (int r = 0; r < nodes_.world(); ++r) {
    move_bytes(blocks.outputs.addresses[static_cast<std::size_t>(r)], all + r * block,
               blocks.outputs.bytes(r, operation.dtype));
  }
}

}  // namespace pycomm::cpu

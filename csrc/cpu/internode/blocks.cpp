#include "cpu/internode/blocks.h"

#include <cstring>

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

}  // namespace pycomm::cpu

#include "cpu/internode/blocks.h"

#include <cstring>

#include "cpu/internode/transport.h"

namespace pycomm::cpu {

BlockMessages::BlockMessages(Comm& comm, const Nodes& nodes, p2p::Engine& engine, double timeout,
                             void (*interrupt)())
    : comm_(comm), nodes_(nodes), engine_(engine), interrupt_(interrupt) {
  options_.always_timed = true;
  options_.timeout =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
}

void BlockMessages::exchange(const Operation& operation, const Call& call,
                             const CallBlocks& blocks) {
  const int ranks = nodes_.world(), self = comm_.number(comm_.rank()), root = operation.root;
  const bool sends_all = operation.collective == Collective::all_to_all ||
                         (operation.collective == Collective::scatter && self == root);
  const bool gets_all = operation.collective == Collective::all_to_all ||
                        (operation.collective == Collective::gather && self == root);
  const auto bytes = [&](const BlockTable& table, int r) {
    return table.counts[static_cast<std::size_t>(r)] * size_of(operation.dtype);
  };
  // The place of the block for, or from, rank r.
  const auto source = [&](int r) {
    return sends_all ? blocks.inputs.addresses[static_cast<std::size_t>(r)]
                     : static_cast<const std::byte*>(call.input);
  };
  const auto target = [&](int r) {
    return gets_all ? blocks.outputs.addresses[static_cast<std::size_t>(r)]
                    : static_cast<std::byte*>(call.output);
  };
  const auto sends_to = [&](int r) {
    return sends_all || (operation.collective == Collective::gather && r == root);
  };
  const auto gets_from = [&](int r) {
    return gets_all || (operation.collective == Collective::scatter && r == root);
  };
  try {
    for (int i = 1; i < ranks; ++i) {
      const int r = (self - i + ranks) % ranks;
      if (gets_from(r)) receive(r, target(r), bytes(blocks.outputs, r));
    }
    for (int i = 1; i < ranks; ++i) {
      const int r = (self + i) % ranks;
      if (sends_to(r)) send(r, source(r), bytes(blocks.inputs, r));
    }
    if (sends_to(self) && gets_from(self) && source(self) != target(self)) {
      const auto own = static_cast<std::size_t>(bytes(blocks.outputs, self));
      if (own > 0) std::memcpy(target(self), source(self), own);
    }
    await_all();
  } catch (const CollectiveError&) {  // of a message
    await_ends();
    throw comm_.failure_of(comm_.decided_word());
  } catch (...) {
    comm_.abort(Reason::aborted, comm_.rank());
    await_ends();
    throw;
  }
}

// After an abort: the tensors must not be in use any more when the caller gets the error.
void BlockMessages::await_ends() {
  for (const p2p::RequestPtr& request : requests_) {
    try {
      request->wait();
    } catch (const CollectiveError&) {
    }
  }
}

p2p::Envelope BlockMessages::envelope(int peer, std::int64_t bytes) const {
  const auto tag = static_cast<std::int32_t>(comm_.ordinal());
  return {peer, tag, Element::u8, bytes, p2p::Channel::collective};
}

void BlockMessages::receive(int from, std::byte* to, std::int64_t bytes) {
  if (bytes == 0) return;
  if (crosses(from)) traffic_.received += bytes;
  requests_.push_back(engine_.irecv(to, envelope(from, bytes), options_));
}

void BlockMessages::send(int to, const std::byte* from, std::int64_t bytes) {
  if (bytes == 0) return;
  if (crosses(to)) traffic_.sent += bytes;
  requests_.push_back(engine_.isend(from, envelope(to, bytes), options_));
}

// Ranks of this node that wait in a later operation learn that this one still waits for others.
void BlockMessages::await_all() {
  for (const p2p::RequestPtr& request : requests_) {
    while (!request->wait(kLook)) {
      comm_.beat();
      if (interrupt_ != nullptr) interrupt_();
    }
  }
}

}  // namespace pycomm::cpu

#include "cpu/p2p/node.h"

#include "cpu/executor/loops.h"

namespace pycomm::cpu::p2p {

void Node::copy_in_peers_heap(std::byte* to, const std::byte* from, std::int64_t bytes) const {
  std::atomic<std::uint32_t>& inside = window.control(rank()).p2p_in_peers_heaps;
  inside.exchange(1);
  if (comm.aborted() == 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  inside.store(0, std::memory_order_release);
  if (comm.aborted() != 0) throw Stopped();
}

void Node::check_match(int source, const Frame& frame, const Request& receive) const {
  const Envelope& wanted = receive.envelope;
  if (frame.bytes == wanted.bytes && frame.element == wanted.element) return;
  window.control(rank()).disagreement = {frame.bytes, wanted.bytes, wanted.tag, frame.element,
                                         wanted.element};
  comm.abort(mismatch_word(source, comm.number(rank())));
  throw Stopped();
}

}  // namespace pycomm::cpu::p2p

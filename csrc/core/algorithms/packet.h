// One-shot in packets, for messages so small that a separate flag costs more than the data.
//
//   1. Publish the operation. Then write the tensor into every peer's window as eight-byte packets:
//      four bytes of data and the operation's 32-bit sequence number. One store writes both, so no
//      fence and no later flag is needed.
//   2. Wait for the other ranks' announcements and check them. They were sent before the packets,
//      so they usually have arrived by now.
//   3. Read each peer's packets as their sequence numbers appear; add in rank order.
//
// Per rank, for S bytes: 2 (n-1) S written to peers, nothing read from them; no signals. Rounds
// once. Reference: the LL protocol of NCCL, in which the data itself signals its arrival. CUDA has the
// same packets, but does these steps at once (cuda/packets.cuh).
//
// Operations alternate between two packet areas, for the same reason as announcements do
// (core/operation.h). Nothing else is written there. A reader overwrites each packet that it has
// read with a sequence number of the other parity, so a stale packet never passes for a new one,
// however old it is. (Fresh memory is 0, which is not a valid sequence number.)
#pragma once

#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

PYCOMM_HD constexpr std::uint64_t make_packet(std::uint32_t data, std::uint32_t sequence) {
  return static_cast<std::uint64_t>(sequence) << 32 | data;
}
PYCOMM_HD constexpr std::uint32_t packet_data(std::uint64_t packet) {
  return static_cast<std::uint32_t>(packet);
}
PYCOMM_HD constexpr std::uint32_t packet_sequence(std::uint64_t packet) {
  return static_cast<std::uint32_t>(packet >> 32);
}

template <PacketExecutor Comm>
PYCOMM_HD void one_shot_packets(Comm& comm) {
  const int n = comm.size(), me = comm.rank();
  comm.publish();
  comm.put_packets(comm.input());
  comm.await_announcements();
  comm.take_packets();
  comm.reduce(
      1, [&](int) { return comm.output(); }, n,
      [&](int r) { return r == me ? comm.input() : comm.taken(r); }, comm.count(), true);
}

}  // namespace pycomm

// One-shot in packets: for messages so small that one flag per message costs more than the message.
//
//   1. Publish the operation, then put own data into every peer's window, four bytes to an
//      eight-byte packet whose other half is the operation's number. One store carries both: no
//      fence, and no flag that comes later.
//   2. Meet the other ranks' announcements (sent before the packets, so there by now); check them.
//   3. Take each peer's packets as their numbers appear; add in rank order.
//
// Per rank, for S bytes: 2 (n-1) S written to peers, nothing read from them; no signals. Rounds
// once. Reference: the LL protocol of NCCL, whose idea it is that the data tell that they are there.
//
// The packets of an operation lie in one of two areas in turn, for the reason why announcements do
// (core/operation.h). Nothing else is ever written there, and who takes a packet leaves a number of
// the other parity in its place: no stale word passes for a new one, however old it is. (Fresh
// memory says 0, which is no operation's number.)
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

template <PlainExecutor Comm>
PYCOMM_HD void one_shot_packets(Comm& comm) {
  const int n = comm.size(), me = comm.rank();
  comm.publish();
  for (int i = 1; i < n; ++i) comm.put_packets((me + i) % n, comm.input());
  comm.await_announcements();
  for (int i = 1; i < n; ++i) comm.take_packets((me + i) % n);
  comm.reduce(
      1, [&](int) { return comm.output(); }, n,
      [&](int r) { return r == me ? comm.input() : comm.taken(r); }, comm.count(), true);
}

}  // namespace pycomm

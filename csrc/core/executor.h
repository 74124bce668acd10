// What the algorithms in core/ require of an executor, as concepts that the compiler checks.
//
// The executors are cpu/executor/comm.h and cuda/comm.cuh, their variants for block codecs (coded_comm), and
// the protocol checker, tests/cpp/checker/comm.h. Each asserts its concept once.
//
// If a wait cannot be satisfied, the executor ends the operation. The CPU throws. A CUDA block
// drains: it runs on, with waits that return at once and data steps that do nothing.
#pragma once

#include <concepts>

#include "core/signal.h"

namespace pycomm {

// Announces an operation and exchanges signals with the other ranks.
template <class Comm>
concept Signaller = requires(Comm& comm, int channel, std::int64_t step) {
  { comm.rank() } -> std::same_as<int>;
  { comm.size() } -> std::same_as<int>;
  comm.announce();               // publishes this operation; returns once every rank has
  comm.signal(channel);          // release: ranks that wait for it see all earlier writes
  comm.wait_all(channel, step);  // acquire: every other rank has signalled `step` times
};

// Moves and reduces the elements of tensors.
template <class Comm>
concept Executor = Signaller<Comm> && requires(Comm& comm, int r, int channel, std::int64_t n,
                                               Location location, Location (&locations)(int)) {
  // Slots hold encoded elements (core/codecs/codec.h). Every contribution then goes through a slot,
  // so that no rank's own contribution is more exact than the others.
  { Comm::kCoded } -> std::convertible_to<bool>;
  comm.wait(r, channel, n);                            // as wait_all, but only for rank r
  { comm.count() } -> std::same_as<std::int64_t>;      // elements of this operation
  { comm.elements(n) } -> std::same_as<std::int64_t>;  // that fit into n bytes
  { comm.line() } -> std::same_as<std::int64_t>;       // elements in a cache line
  { comm.zero_copy() } -> std::same_as<bool>;  // valid after announce(): use tensors in place
  { comm.input() } -> std::same_as<Location>;  // this rank's tensor
  { comm.output() } -> std::same_as<Location>;
  { comm.input(r) } -> std::same_as<Location>;  // rank r's tensor, if zero_copy()
  { comm.output(r) } -> std::same_as<Location>;
  { comm.slot(r, n) } -> std::same_as<Location>;        // staging slot n of rank r
  { comm.slot_count() } -> std::same_as<std::int64_t>;  // elements in a slot
  { comm.at(location, n) } -> std::same_as<Location>;   // n elements further
  comm.copy(location, location, n);                     // to, from, elements
  // reduce(outputs, to, inputs, from, n, last): to(0), to(1), ... = from(0) op from(1) op ..., n
  // elements each. An input may be the result of an earlier reduce(). `last`: none comes later, so
  // that finish() of core/reduce.h is applied.
  comm.reduce(1, locations, 1, locations, n, true);
};

// An executor for uncompressed tensors.
template <class Comm>
concept PlainExecutor = Executor<Comm> && !Comm::kCoded && requires(Comm& comm) {
  { comm.root() } -> std::same_as<int>;
  { comm.block() } -> std::same_as<std::int64_t>;  // elements of one rank's block
};

// Sends small tensors in packets (core/algorithms/packet.h).
template <class Comm>
concept PacketExecutor = PlainExecutor<Comm> && requires(Comm& comm, int r, Location location) {
  comm.publish();  // the two halves of announce()
  comm.await_announcements();
  { comm.fits_packets() } -> std::same_as<bool>;
  comm.put_packets(location);  // for all other ranks
  comm.take_packets();         // of all other ranks
  { comm.taken(r) } -> std::same_as<Location>;
};

// Has a switch that reaches one place in the windows of all ranks (core/algorithms/multicast.h).
template <class Comm>
concept MulticastExecutor =
    PlainExecutor<Comm> && requires(Comm& comm, std::int64_t n, Location (&locations)(int)) {
      // reduce_in_switch(outputs, inputs, n): to(0), to(1), ... = from(0) + from(1) + ..., in any order,
      // n elements each, and finish() of core/reduce.h. The locations are at the same place of all
      // windows, and no other rank uses them meanwhile.
      comm.reduce_in_switch(locations, locations, n);
    };

// May hold the blocks of its tensors apart from each other (core/algorithms/blocks.h).
template <class Comm>
concept BlockExecutor = PlainExecutor<Comm> && requires(Comm& comm, int r, std::int64_t n) {
  // Element n of this rank's tensor, if its blocks had comm.block() elements and followed each other.
  { comm.input_at(n) } -> std::same_as<Location>;
  { comm.output_at(n) } -> std::same_as<Location>;
  { comm.input_count(r) } -> std::same_as<std::int64_t>;  // elements in block r
  { comm.output_count(r) } -> std::same_as<std::int64_t>;
};

// Exchanges lists of elements (core/algorithms/topk_exchange.h).
template <class Comm>
concept ListExecutor = Signaller<Comm> && requires(Comm& comm, int owner) {
  comm.stage(owner);   // writes this rank's list for an owner
  comm.reduce();       // adds the lists that this rank owns and writes the result
  comm.gather(owner);  // reads an owner's result into the output
};

}  // namespace pycomm

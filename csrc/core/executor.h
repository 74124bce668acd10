// What the algorithms in core/ need of an executor, as concepts that the compiler checks.
//
// Executors: cpu/comm.h and cuda/comm.cuh; the same with a codec of blocks, coded_comm; and the one
// that checks the protocol, tests/cpp/checker/comm.h. Each asserts its concept once.
//
// A wait that cannot be satisfied ends by the executor's means: the CPU throws; a CUDA block
// drains, that is, runs on with waits that return at once and data steps that do nothing.
#pragma once

#include <concepts>

#include "core/signal.h"

namespace pycomm {

// Ranks that meet and signal each other.
template <class Comm>
concept Signaller = requires(Comm& comm, int channel, std::int64_t step) {
  { comm.rank() } -> std::same_as<int>;
  { comm.size() } -> std::same_as<int>;
  comm.announce();               // publishes this operation; returns once every rank has
  comm.signal(channel);          // release: what this rank did before is visible to who waits
  comm.wait_all(channel, step);  // acquire: every other rank has signalled `step` times
};

// Ranks that move and reduce a tensor's elements.
template <class Comm>
concept Executor = Signaller<Comm> && requires(Comm& comm, int r, int channel, std::int64_t n,
                                               Location location, Location (&locations)(int)) {
  // Slots hold encoded elements (core/codecs/codec.h). Every contribution then goes through a slot, so
  // that no rank's own is more exact than the others.
  { Comm::kCoded } -> std::convertible_to<bool>;
  comm.wait(r, channel, n);                            // as wait_all, for rank r
  { comm.count() } -> std::same_as<std::int64_t>;      // elements of this operation
  { comm.elements(n) } -> std::same_as<std::int64_t>;  // in n bytes
  { comm.line() } -> std::same_as<std::int64_t>;       // elements in a cache line
  { comm.zero_copy() } -> std::same_as<bool>;  // after announce(): tensors lie in the windows
  { comm.input() } -> std::same_as<Location>;  // this rank's tensors
  { comm.output() } -> std::same_as<Location>;
  { comm.input(r) } -> std::same_as<Location>;  // rank r's, if zero_copy()
  { comm.output(r) } -> std::same_as<Location>;
  { comm.slot(r, n) } -> std::same_as<Location>;        // staging slot n of rank r
  { comm.slot_count() } -> std::same_as<std::int64_t>;  // elements in a slot
  { comm.at(location, n) } -> std::same_as<Location>;   // n elements further
  comm.copy(location, location, n);                     // to, from, elements
  // locations(0), locations(1), ... = locations(0) op locations(1) op ...; true: nothing is added later.
  comm.reduce(1, locations, 1, locations, n, true);
};

// Executors of tensors as they are.
template <class Comm>
concept PlainExecutor =
    Executor<Comm> && !Comm::kCoded && requires(Comm& comm, int r, Location location) {
      { comm.root() } -> std::same_as<int>;
      { comm.block() } -> std::same_as<std::int64_t>;  // elements of one rank's share
      comm.publish();                                  // the halves of announce()
      comm.await_announcements();
      { comm.fits_packets() } -> std::same_as<bool>;  // core/algorithms/packet.h
      comm.put_packets(r, location);
      comm.take_packets(r);
      { comm.taken(r) } -> std::same_as<Location>;
    };

// Ranks that exchange lists of elements (core/algorithms/topk_exchange.h).
template <class Comm>
concept ListExecutor = Signaller<Comm> && requires(Comm& comm, int owner) {
  comm.stage(owner);   // writes this rank's list for an owner
  comm.reduce();       // adds the lists for this owner and writes its result
  comm.gather(owner);  // reads an owner's result into the output
};

}  // namespace pycomm

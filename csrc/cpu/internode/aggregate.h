// A compressed tensor of a node whose ranks act as one rank of the exchange: what goes through the
// codec are the fp32 sums of their gradients, residuals and velocities. Each rank that carries a
// stripe has these sums of its stripe, without gaps, and keeps what is fed back; the others' is zero
// from then on, so that sums over ranks are what they would be anyway.
//
// It comes together and goes out tile by tile (core/algorithms/stripes.h), so that this and the link between
// nodes overlap. Where something is fed back, all has to come together first: what it may become
// is agreed upon before anything is sent.
#pragma once

#include "core/algorithms/internode.h"
#include "core/algorithms/stripes.h"
#include "core/call.h"
#include "cpu/comm.h"
#include "cpu/internode/link.h"
#include "cpu/internode/nodes.h"

namespace pycomm::cpu {

// Bits of Preflight::overflow when all is done: residuals are untouched; or a value was not finite
// nevertheless.
inline constexpr std::uint16_t kUntouched = 1, kNonfinite = 2;

// What a rank says that has nothing to say.
inline constexpr Preflight kNoObjection = make_preflight(false, true);

// Kept from one operation to the next.
struct AggregateMemory {
  Scratch wide, gradient, residual, velocity;
};

class NodeAggregate {
 public:
  NodeAggregate(Comm& comm, const Nodes& nodes, AggregateMemory& memory, const Operation& operation,
                const Call& call);

  // Of this rank's stripe; the call's tensors are the sums.
  const Operation& carried() const { return carried_; }
  const Call& call() const { return carried_call_; }
  const TileRanges& tile_ranges() const { return tile_ranges_; }

  // Before the first tile is sent, where that is needed.
  void collect_first();
  // Of all ranks of this node, in the order of ranks.
  void collect(std::int64_t t) {
    if (!complete_) collect_tile(t);
  }
  // Puts the stripe's results where they belong, on all ranks of this node. `mine`: what this
  // rank's stripe has come to so far; returns that of all stripes.
  Preflight spread(std::int64_t t, Preflight mine);
  // What is fed back goes into the caller's tensors.
  void keep() const;

 private:
  bool owns_stripe() const { return comm_.rank() < interleave_.stripes; }
  std::int64_t packed(std::int64_t begin) const;
  Operation operation_on(const Range& range, DType dtype) const;
  void collect_tile(std::int64_t t);
  void fold(const Range& range, const float* mine, float* sums);
  const float* widened(const Range& range);
  bool narrow(const Range& range);
  void keep(const float* carried, float* state) const;

  Comm& comm_;
  const Nodes& nodes_;
  Scratch& wide_;
  const Operation& operation_;
  const Call& call_;
  const StripeInterleave interleave_;
  const TileRanges tile_ranges_;
  Operation carried_;
  Call carried_call_;
  float* gradient_ = nullptr;
  bool complete_ = false;
  bool nonfinite_ = false;
};

// A rank's part in an exchange (core/algorithms/internode.h) whose tensor comes out of an aggregate and goes back there.
// `Stages`: what it does between nodes. `finding()`: what that has come to.
template <class Stages, class Finding>
class AggregateStages {
 public:
  AggregateStages(NodeAggregate& aggregate, Stages& stages, Finding finding)
      : aggregate_(aggregate), stages_(stages), finding_(std::move(finding)) {}

  std::int64_t tiles() const { return aggregate_.tile_ranges().tiles(); }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return true; }
  void stage(std::int64_t t) {
    aggregate_.collect(t);
    stages_.stage(t);
  }
  Batch staged(std::int64_t t) { return stages_.staged(t); }
  void reduce(std::int64_t t) { stages_.reduce(t); }
  Batch reduced(std::int64_t t) { return stages_.reduced(t); }
  void meanwhile(std::int64_t t) { stages_.meanwhile(t); }
  void gather(std::int64_t t) {
    stages_.gather(t);
    preflight_ = aggregate_.spread(t, finding_());
  }
  // Of the whole node, when all is done.
  Preflight preflight() const { return preflight_; }

 private:
  NodeAggregate& aggregate_;
  Stages& stages_;
  Finding finding_;
  Preflight preflight_;
};

// Of a rank that carries no stripe: there is nothing between nodes for it to do.
struct NoStages {
  void stage(std::int64_t) {}
  Batch staged(std::int64_t) { return {}; }
  void reduce(std::int64_t) {}
  Batch reduced(std::int64_t) { return {}; }
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t) {}
};
struct NoLink {
  std::int64_t post(const Batch&) { return 0; }
  void wait(std::int64_t) {}
};

}  // namespace pycomm::cpu

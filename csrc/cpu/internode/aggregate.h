// Compressed operations between nodes with several ranks each. The ranks of a node act as one rank
// of the exchange: the codec is applied to the fp32 sums of their gradients, residuals and
// velocities. Each rank that carries a stripe holds these sums for its stripe, without gaps.
// Afterwards the caller's residual and velocity hold the stripe's values, and zeros elsewhere, so
// that sums over ranks stay the same.
//
// Tiles are collected from the node's ranks and spread to them one by one
// (core/algorithms/stripes.h), so that this overlaps with the exchange between nodes. With
// feedback, all tiles are collected first, because the nodes agree on a preflight before any of
// them sends data.
#pragma once

#include "core/algorithms/internode.h"
#include "core/algorithms/stripes.h"
#include "core/call.h"
#include "core/nodes.h"
#include "cpu/executor/comm.h"
#include "cpu/internode/link.h"

namespace pycomm::cpu {

// Buffers that are kept from one operation to the next.
struct AggregateMemory {
  Scratch wide, gradient, residual, velocity;
};

// A tensor's elements in fp32: the tensor itself, or a copy.
const float* widened(DType dtype, const void* x, std::int64_t n, Scratch& copy);

class NodeAggregate {
 public:
  NodeAggregate(Comm& comm, const Nodes& nodes, AggregateMemory& memory, const Operation& operation,
                const Call& call);

  // The operation on this rank's stripe, and its call, whose tensors are the sums.
  const Operation& carried() const { return carried_; }
  const Call& call() const { return carried_call_; }
  const TileRanges& tile_ranges() const { return tile_ranges_; }

  // Call this before the first tile is sent. Collects all tiles if the operation needs that.
  void collect_first();
  // Adds tile t over all ranks of this node, in rank order.
  void collect(std::int64_t t) {
    if (!complete_) collect_tile(t);
  }
  // Writes tile t of the result to all ranks of this node. `mine` is the outcome of this rank's
  // stripe so far; returns the outcome of all stripes.
  Preflight spread(std::int64_t t, Preflight mine);
  // Writes residual and velocity back to the caller's tensors.
  void store_feedback() const;

 private:
  bool owns_stripe() const { return comm_.rank() < interleave_.stripes; }
  std::int64_t packed(std::int64_t begin) const;
  Operation operation_on(const Range& range, DType dtype) const;
  void collect_tile(std::int64_t t);
  void fold(const Range& range, const float* mine, float* sums);
  bool narrow(const Range& range);
  void store_feedback(const float* carried, float* state) const;

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

// The stages of an exchange (core/algorithms/internode.h) whose tensor is collected from a node's
// ranks and spread to them. `Stages` does the work between nodes; `finding()` returns its outcome
// so far.
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
  // The outcome for the whole node, when the exchange has ended.
  Preflight preflight() const { return preflight_; }

 private:
  NodeAggregate& aggregate_;
  Stages& stages_;
  Finding finding_;
  Preflight preflight_;
};

// For ranks that carry no stripe, which have nothing to do between nodes.
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

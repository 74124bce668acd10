// A compressed tensor of a machine whose ranks act as one rank of the exchange: what goes through the
// codec are the fp32 sums of their gradients, residuals and velocities. Each rank that carries a
// stripe has these sums of its stripe, without gaps, and keeps what is fed back; the others' is zero
// from then on, so that sums over ranks are what they would be anyway.
//
// It comes together and goes out tile by tile (core/algorithms/stripes.h), so that this and the link between
// machines overlap. Where something is fed back, all has to come together first: what it may become
// is agreed upon before anything is sent.
#pragma once

#include "core/algorithms/internode.h"
#include "core/algorithms/stripes.h"
#include "core/call.h"
#include "cpu/comm.h"
#include "cpu/internode/link.h"
#include "cpu/internode/nodes.h"

namespace pycomm::cpu {

// Bits of Outlook::overflow when all is done: residuals are untouched; or a value was not finite
// nevertheless.
inline constexpr std::uint16_t kUntouched = 1, kNonfinite = 2;

// What a rank says that has nothing to say.
inline constexpr Outlook kIndifferent = make_outlook(false, true);

// Kept from one operation to the next.
struct PoolMemory {
  Scratch wide, gradient, residual, velocity;
};

class Pool {
 public:
  Pool(Comm& comm, const Machines& machines, PoolMemory& memory, const Operation& operation,
       const Call& call);

  // Of this rank's stripe; the call's tensors are the sums.
  const Operation& carried() const { return carried_; }
  const Call& call() const { return carried_call_; }
  const Stretches& stretches() const { return stretches_; }

  // Before the first tile is sent, where that is needed.
  void collect_first();
  // Of all ranks of this machine, in the order of ranks.
  void collect(std::int64_t t) {
    if (!complete_) collect_tile(t);
  }
  // Puts the stripe's results where they belong, on all ranks of this machine. `mine`: what this
  // rank's stripe has come to so far; returns that of all stripes.
  Outlook spread(std::int64_t t, Outlook mine);
  // What is fed back goes into the caller's tensors.
  void keep() const;

 private:
  bool carries() const { return comm_.rank() < cycles_.stripes; }
  std::int64_t packed(std::int64_t begin) const;
  Operation stretch_of(const Range& range, DType dtype) const;
  void collect_tile(std::int64_t t);
  void fold(const Range& range, const float* mine, float* sums);
  const float* widened(const Range& range);
  bool narrow(const Range& range);
  void keep(const float* carried, float* state) const;

  Comm& comm_;
  const Machines& machines_;
  Scratch& wide_;
  const Operation& operation_;
  const Call& call_;
  const Cycles cycles_;
  const Stretches stretches_;
  Operation carried_;
  Call carried_call_;
  float* gradient_ = nullptr;
  bool complete_ = false;
  bool nonfinite_ = false;
};

// A rank's part in an exchange (core/algorithms/internode.h) whose tensor comes out of a pool and goes back there.
// `Part`: what it does between machines. `finding()`: what that has come to.
template <class Part, class Finding>
class Pooled {
 public:
  Pooled(Pool& pool, Part& part, Finding finding)
      : pool_(pool), part_(part), finding_(std::move(finding)) {}

  std::int64_t tiles() const { return pool_.stretches().tiles(); }
  static constexpr bool reduces() { return true; }
  static constexpr bool gathers() { return true; }
  void stage(std::int64_t t) {
    pool_.collect(t);
    part_.stage(t);
  }
  Round staged(std::int64_t t) { return part_.staged(t); }
  void reduce(std::int64_t t) { part_.reduce(t); }
  Round reduced(std::int64_t t) { return part_.reduced(t); }
  void meanwhile(std::int64_t t) { part_.meanwhile(t); }
  void gather(std::int64_t t) {
    part_.gather(t);
    outlook_ = pool_.spread(t, finding_());
  }
  // Of the whole machine, when all is done.
  Outlook outlook() const { return outlook_; }

 private:
  Pool& pool_;
  Part& part_;
  Finding finding_;
  Outlook outlook_;
};

// Of a rank that carries no stripe: there is nothing between machines for it to do.
struct NoPart {
  void stage(std::int64_t) {}
  Round staged(std::int64_t) { return {}; }
  void reduce(std::int64_t) {}
  Round reduced(std::int64_t) { return {}; }
  void meanwhile(std::int64_t) {}
  void gather(std::int64_t) {}
};
struct NoLink {
  std::int64_t post(const Round&) { return 0; }
  void wait(std::int64_t) {}
};

}  // namespace pycomm::cpu

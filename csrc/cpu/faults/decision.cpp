#include "cpu/faults/decision.h"

namespace pycomm::cpu {

Call Decision::call() {
  Call call;
  call.operation.collective = Collective::barrier;
  call.details.set_label("should_commit");
  call.body = this;
  return call;
}

// As always, a finding of one rank suffices (core/operation.h); here the finding is that the rank
// is not ready.
Preflight Decision::preflight() const {
  Preflight mine;
  mine.nonfinite = static_cast<std::uint8_t>(!ready_);
  return mine;
}

void Decision::run(Comm& comm) {
  comm.announce();
  const bool all_ready = comm.preflight().nonfinite == 0;
  outcome_ = comm.settle(made_ + 1, all_ready ? Outcome::yes : Outcome::no);
  ++made_;
}

// A rank that has failed gives up, unless another rank has already committed.
void Decision::note_failure(const Comm& comm) {
  if (outcome_ == Outcome::none) outcome_ = comm.settle(made_ + 1, Outcome::failed);
}

}  // namespace pycomm::cpu

// A decision that holds on all ranks, although some of them may fail while it is made: whether all
// are ready for a step. As in Gray and Lamport 2006, "Consensus on transaction commit", nobody may
// commit if another one has given up; here the first compare-and-swap on a word in the window
// decides, so a rank that dies cannot keep the others from knowing.
#pragma once

#include "core/call.h"
#include "cpu/executor/custom_operation.h"

namespace pycomm::cpu {

class Decision final : public CustomOperation {
 public:
  // `made`: the number of decisions of this group so far.
  Decision(bool ready, std::uint64_t& made) : ready_(ready), made_(made) {}

  Call call();
  Preflight preflight() const override;
  void run(Comm& comm) override;
  void note_failure(const Comm& comm) override;
  Outcome outcome() const { return outcome_; }

 private:
  const bool ready_;
  std::uint64_t& made_;
  Outcome outcome_ = Outcome::none;
};

}  // namespace pycomm::cpu

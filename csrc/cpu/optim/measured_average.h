// Measured average: an all-reduce of a bucket of gradients in place, which also adds up the squares that
// the gradients' norm is made of (core/optim/square_sum.h).
//
//   1. Announce: the bucket is complete on every rank.
//   2. Average: each rank averages its share of the bucket for all ranks, as in a two-shot all-reduce, and
//      adds up the squares of every 1,024 elements of a gradient while they are in its cache. It writes
//      zeros as the sums of other ranks' shares, so a sum over all ranks gives the sums of all, exactly.
//
// The ranks' shares are cut where sums are, so they are as equal as 1,024 elements allow. Gaps between
// gradients are not exchanged. The averages have the bits of any all-reduce that adds in rank order,
// and the sums those of grad_norm() (cpu/optim/step.h). Bytes and signals are those of two-shot without
// copies (core/algorithms/two_shot.h). All buckets must lie in windows.
#pragma once

#include <vector>

#include "core/optim/optimizer.h"
#include "cpu/own_body.h"

namespace pycomm::cpu {

class MeasuredAverage final : public OwnBody {
 public:
  // `average`: the all-reduce in place, uncompressed. `gradients`: their places in the bucket.
  // `sums`: one for every 1,024 elements of each gradient.
  MeasuredAverage(Call average, std::vector<Range> gradients, double* sums);

  // The call that runs it, as long as this object lives.
  const Call& call() const { return call_; }
  void run(Comm& comm) override;

 private:
  Call call_;
  std::vector<Range> gradients_;
  double* sums_;
};

}  // namespace pycomm::cpu

// LAMB's sums of squares of weights and of update directions.
#pragma once

#include "core/optim/lamb.h"
#include "cuda/optim/sums.cuh"

namespace pycomm::cuda {

// Adds this lane's share of a run of `left` elements, whose gradients lie at `grads`.
__device__ inline void add_lamb_run(const Segment& segment, const Lamb& lamb, float scale,
                                    const void* grads, std::int64_t at, int left,
                                    double (&sum)[2]) {
  AnyWeights<Strided> weights;
  AnyState<Strided> first, second;
  const ElementRun run{at, left, grads, 0};
  weights.load(segment, run);
  first.load(segment, 0, run);
  second.load(segment, 1, run);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (Strided::offset(i) >= left) continue;
    const float weight = weights.p[i];
    float m = first.loaded[i], v = second.loaded[i];
    const double both[] = {weight, lamb.direction(weights.g[i] * scale, weight, m, v)};
    for (int k = 0; k < 2; ++k) sum[k] += both[k] * both[k];
  }
}

// The sums of all lanes' shares, for all lanes.
template <int kSums>
__device__ void fold_lanes(double (&sum)[kSums]) {
  for (int k = 0; k < kSums; ++k) {
    const double mine = sum[k];
    sum[k] = sum_by_warp(kSumLanes, [mine](std::int64_t) { return mine; });
  }
}

}  // namespace pycomm::cuda

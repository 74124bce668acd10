#include "cuda/optim/lamb_sums.cuh"
#include "cuda/optim/launch.h"

namespace pycomm::cuda {
namespace {

// Sums of squares of a piece's weights and of its update directions.
__device__ void lamb_sums(const Segment& segment, std::int64_t piece, const Lamb& lamb, float scale,
                          double (&sum)[2]) {
  const auto* const grads = static_cast<const std::byte*>(segment.grad);
  const std::int64_t end = segment.count, size = size_of(segment.grad_storage);
  sum[0] = sum[1] = 0.0;
  for (std::int64_t at = piece * kSumBlock; at < (piece + 1) * kSumBlock && at < end; at += kRun) {
    const int left = static_cast<int>(end - at < kRun ? end - at : kRun);
    add_lamb_run(segment, lamb, scale, grads + at * size, at, left, sum);
  }
  fold_lanes(sum);
}

__global__ void __launch_bounds__(kStepThreads, kLambRatioBlocks)
    ratio_kernel(const __grid_constant__ StepLaunch launch) {
  const Table& table = launch.table;
  const ParamRange& params = launch.params;
  if (skips(launch.control)) return;
  const auto within = trees_within<2>(table);
  const Settings settings = settings_now(params.settings, params.lr, params.lr_is_double);
  const float scale = gradient_factor(settings.maximize, launch.control);
  double step = 0.0;
  Lamb lamb(settings, 1.0);
  const std::int64_t end = params.first + params.count;
  visit_pieces<1>(table, params.first, end, [&](const SumPiece& piece) {
    const Segment segment = table.segment(piece.segment);
    if (*segment.step + 1.0 != step) {
      step = *segment.step + 1.0;
      lamb = Lamb(settings, step);
    }
    double sum[2];
    lamb_sums(segment, piece.number, lamb, scale, sum);
    if (within.climb(piece, sum) && lane() == 0) {
      table.ratios()[piece.segment] = lamb_ratio(sum[0], sum[1]);
    }
  });
}

}  // namespace

void launch_lamb_ratios(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  launch_blocks<&ratio_kernel>(blocks, launch, stream, kStepThreads);
}

}  // namespace pycomm::cuda

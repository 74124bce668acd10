#include "cuda/optim/launch.h"
#include "cuda/optim/sums.cuh"

namespace pycomm::cuda {
namespace {

template <class T>
__device__ double squares(const void* data, std::int64_t at, std::int64_t n) {
  const T* const from = static_cast<const T*>(data) + at;
  return sum_by_warp(n, [from](std::int64_t i) {
    const double value = load(from[i]);
    return value * value;
  });
}

__device__ double grad_squares(const Segment& segment, std::int64_t piece) {
  const std::int64_t at = piece * kSumBlock, left = segment.count - at;
  const std::int64_t n = left < kSumBlock ? left : kSumBlock;
  switch (segment.grad_storage) {
    case Storage::f32:
      return squares<float>(segment.grad, at, n);
    case Storage::f16:
      return squares<Half>(segment.grad, at, n);
    default:
      return squares<BFloat16>(segment.grad, at, n);
  }
}

__global__ void __launch_bounds__(kStepThreads, kGradNormBlocks)
    grad_norm_kernel(const __grid_constant__ GradNormLaunch launch) {
  const Table& table = launch.table;
  const StepControl& control = launch.control;
  const auto within = trees_within<1>(table), over = trees_over<1>(table);
  visit_pieces(table, 0, table.segments, [&](const SumPiece& piece) {
    double sum[] = {grad_squares(table.segment(piece.segment), piece.number)};
    if (!within.climb(piece.first, piece.segment, piece.number, piece.pieces, sum) ||
        !over.climb(0, 0, piece.segment, table.segments, sum) || lane() != 0) {
      return;
    }
    if (launch.pass.sets_found) *control.found_inf = 0.0f;
    *launch.pass.norm = conclude(sum[0], launch.pass.max_norm, control);
  });
}

}  // namespace

void launch_grad_norm(const GradNormLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  launch_blocks<&grad_norm_kernel>(blocks, launch, stream, kStepThreads);
}

}  // namespace pycomm::cuda

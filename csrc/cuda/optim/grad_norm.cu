#include "cuda/optim/launch.h"
#include "cuda/optim/sums.cuh"

namespace pycomm::cuda {
namespace {

// A warp takes this many sums at once: eight lanes for each, and each lane adds up four neighbouring
// ones of its 32 partial sums. So loads are wide, and a lane's additions do not wait for one another.
constexpr int kSumsAtOnce = 4, kLanesPerSum = 32 / kSumsAtOnce;
static_assert(kLanesPerSum * kQuad == kSumLanes);

// sum_block() of the squares of `n` elements, by eight lanes. All of them get the sum.
template <class T>
__device__ double squares(const T* block, int n) {
  constexpr int kRows = kSumBlock / kSumLanes, kDepth = 128 / sizeof(Quad<T>);
  const int column = lane() % kLanesPerSum * kQuad;
  const bool whole =
      n >= kSumBlock && reinterpret_cast<std::uintptr_t>(block) % alignof(Quad<T>) == 0;
  double sum[kQuad] = {};
  const auto add = [&](const Quad<T>& row) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const double value = load(row.element[i]);
      sum[i] = std::fma(value, value, sum[i]);  // the product is exact
    }
  };
  if (whole) {
    const auto* quads = reinterpret_cast<const Quad<T>*>(block + column);
#pragma unroll 1
    for (int row = 0; row < kRows; row += kDepth) {
      Quad<T> rows[kDepth];
#pragma unroll
      for (int k = 0; k < kDepth; ++k) rows[k] = quads[(row + k) * kLanesPerSum];
#pragma unroll
      for (int k = 0; k < kDepth; ++k) add(rows[k]);
    }
  } else {
#pragma unroll 4
    for (int row = 0; row < kRows; ++row) {
      Quad<T> some{};
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const int at = row * kSumLanes + column + i;
        if (at < n) some.element[i] = block[at];
      }
      add(some);
    }
  }
#pragma unroll
  for (int half = kLanesPerSum / 2; half > 0; half /= 2) {
#pragma unroll
    for (double& column_sum : sum) column_sum += __shfl_xor_sync(0xffffffffu, column_sum, half);
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The squares' sums of a piece: lane l gets the l-th.
__device__ double grad_squares(const Segment& segment, const SumPiece& piece) {
  const std::int64_t at = (piece.number + lane() / kLanesPerSum) * kSumBlock;
  const std::int64_t left = segment.count - at;
  const auto n = static_cast<int>(left < kSumBlock ? left : kSumBlock);
  const auto of = [&](auto type) {
    using T = decltype(type);
    return squares(static_cast<const T*>(segment.grad) + at, n);
  };
  const double sum = segment.grad_storage == Storage::f32   ? of(float{})
                     : segment.grad_storage == Storage::f16 ? of(Half{})
                                                            : of(BFloat16{});
  return __shfl_sync(0xffffffffu, sum, lane() * kLanesPerSum);
}

__global__ void __launch_bounds__(kStepThreads, kGradNormBlocks)
    grad_norm_kernel(const __grid_constant__ GradNormLaunch launch) {
  const Table& table = launch.table;
  const StepControl& control = launch.control;
  const auto within = trees_within<1>(table), over = trees_over<1>(table);
  visit_pieces<kSumsAtOnce>(table, 0, table.segments, [&](const SumPiece& piece) {
    double sum[] = {grad_squares(table.segment(piece.segment), piece)};
    if (!within.climb(piece, sum) || !over.climb(0, 0, piece.segment, table.segments, sum) ||
        lane() != 0) {
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

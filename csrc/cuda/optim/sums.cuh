// Sums of squares over segments, in the order of core/optim/square_sum.h. A warp adds up 1024
// elements, or several times 1024 at once. The warp that brings the last of a sum's 1024 terms adds
// them up and continues with the result, so that the whole device works on the tree and no block
// waits for another one.
#pragma once

#include <algorithm>

#include "cuda/optim/numbers.cuh"
#include "cuda/optim/ticket.cuh"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

inline constexpr int kSumWarps = kStepThreads / 32;

// sum_block() by all threads of a warp, one lane each. All threads get the sum.
template <class Term>
__device__ double sum_by_warp(std::int64_t n, const Term& term) {
  double sum = 0.0;
#pragma unroll 16
  for (std::int64_t i = lane(); i < n; i += kSumLanes) sum += term(i);
#pragma unroll
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, half);
  }
  return sum;
}

// Trees that add up `kSums` numbers at once.
template <int kSums>
struct Trees {
  Forest forest;
  double* terms;
  std::uint32_t* tickets;

  // A warp brings `count` of n terms of the tree whose leaves begin at `first`: lane l holds term
  // i + l. They are terms of one sum. Returns true in exactly one warp: there `sum` is then the whole
  // tree's sum, in lane 0.
  __device__ bool climb(std::int64_t first, std::int64_t tree, std::int64_t i, int count,
                        std::int64_t n, double (&sum)[kSums]) const {
    for (int level = 0; n > 1; ++level, count = 1) {
      double* const row = terms + kSums * forest.place(level, first, tree);
      const std::int64_t parent = i / kSumBlock, left = n - parent * kSumBlock;
      const std::int64_t size = left < kSumBlock ? left : kSumBlock;
      std::uint32_t* const ticket =
          tickets + forest.place(level + 1, first, tree) - forest.begin(1) + parent;
      if (lane() < count) {
        for (int k = 0; k < kSums; ++k) row[(i + lane()) * kSums + k] = sum[k];
      }
      __syncwarp();
      const bool last = lane() == 0 && take_ticket(ticket, count, size);
      if (!__any_sync(0xffffffffu, last)) return false;
      __syncwarp();  // unlike the vote, it orders memory: first lane 0's ticket, then all lanes' loads
      const volatile double* const block = row + parent * kSumBlock * kSums;
      for (int k = 0; k < kSums; ++k) {
        sum[k] = sum_by_warp(size, [&](std::int64_t t) { return block[t * kSums + k]; });
      }
      i = parent;
      n = sum_blocks(n);
    }
    return true;
  }
};

// The trees within segments, and the tree over all segments.
template <int kSums>
__device__ Trees<kSums> trees_within(const Table& table) {
  return {table.forest(), table.terms(), table.step_ticket() + 1};
}
template <int kSums>
__device__ Trees<kSums> trees_over(const Table& table) {
  const Forest forest = table.forest();
  return {table.totals(), table.terms() + 2 * forest.terms(),
          table.step_ticket() + 1 + forest.tickets()};
}

// Neighbouring sums of a segment that are terms of one sum.
struct SumPiece {
  std::int64_t segment, first;  // its trees' first leaf
  std::int64_t number;          // of the first sum, in the segment
  int count;
  std::int64_t sums;  // of the segment
};

// Calls visit(piece) for this warp's sums of the segments [first, last), at most kMost at a time.
// Called by all threads of the warp.
template <int kMost, class Visit>
__device__ void visit_pieces(const Table& table, std::int64_t first, std::int64_t last,
                             const Visit& visit) {
  const std::int64_t stop = table.first_tile(last) * kTileSums;
  const std::int64_t warp = blockIdx.x * kSumWarps + threadIdx.x / 32;
  std::int64_t at = table.first_tile(first) * kTileSums + warp * kMost, end = 0;
  SumPiece piece{};
  for (; at < stop; at += gridDim.x * kSumWarps * kMost) {
    const std::int64_t batch_end = std::min(at + kMost, stop);
    for (std::int64_t from = at; from < batch_end;) {
      if (from >= end) {
        const std::int64_t s = table.segment_at(from / kTileSums, first, last);
        const std::int64_t elements = table.segment(s).count;
        end = table.first_tile(s + 1) * kTileSums;
        piece = {s, table.first_tile(s) * kTileSums, 0, 0,
                 elements == 0 ? 1 : sum_blocks(elements)};
      }
      piece.number = from - piece.first;
      const std::int64_t parent_end = round_up(piece.number + 1, kSumBlock);
      const std::int64_t piece_end = piece.first + std::min(piece.sums, parent_end);
      piece.count = static_cast<int>(std::min(batch_end, piece_end) - from);
      if (piece.count > 0) visit(piece);
      from += piece.count > 0 ? piece.count : 1;  // a segment's last slot may be empty
    }
  }
}

}  // namespace pycomm::cuda

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

// Neighbouring sums of a segment that are terms of one sum.
struct SumPiece {
  std::int32_t segment;
  std::int32_t first;   // the first leaf of the segment's trees
  std::int32_t sums;    // of the segment
  std::int32_t number;  // of the piece's first sum, in the segment
  std::int32_t count;
  std::int32_t before;  // terms of the same sum that the warp has visited before
  bool last;            // the warp visits no more of them
};

// Trees that add up `kSums` numbers at once.
template <int kSums>
struct Trees {
  Forest forest;
  double* terms;
  std::uint32_t* tickets;

  // A warp brings its piece of a segment's terms: lane l holds the l-th. As climb() below.
  __device__ bool climb(const SumPiece& piece, double (&sum)[kSums]) const {
    return climb(piece.first, piece.segment, piece.number, piece.sums, sum, piece.count,
                 piece.last ? piece.before + piece.count : 0);
  }

  // A warp brings `count` of n terms of the tree whose leaves begin at `first`: lane l holds term
  // i + l. They are terms of one sum, of which the warp has brought `brought` now; 0 if it brings more
  // of them later. Returns true in exactly one warp: there `sum` is then the whole tree's sum, in
  // lane 0.
  __device__ bool climb(std::int64_t first, std::int64_t tree, std::int64_t i, std::int64_t n,
                        double (&sum)[kSums], int count = 1, int brought = 1) const {
    for (int level = 0; n > 1; ++level, count = brought = 1) {
      double* const row = terms + kSums * forest.place(level, first, tree);
      const std::int64_t parent = i / kSumBlock, left = n - parent * kSumBlock;
      const std::int64_t size = left < kSumBlock ? left : kSumBlock;
      std::uint32_t* const ticket =
          tickets + forest.place(level + 1, first, tree) - forest.begin(1) + parent;
      if (lane() < count) {
        for (int k = 0; k < kSums; ++k) row[(i + lane()) * kSums + k] = sum[k];
      }
      if (brought == 0) return false;
      __syncwarp();
      const bool last = lane() == 0 && take_ticket(ticket, brought, size);
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

// Calls visit(piece) for this warp's sums of the segments [first, last), at most kMost at a time.
// Warps take equal ranges, so that each counts its terms of a sum once (Trees): a fence costs as much as
// the loads of thousands of elements. Called by all threads of the warp.
template <int kMost, class Visit>
__device__ void visit_pieces(const Table& table, std::int64_t first, std::int64_t last,
                             const Visit& visit) {
  const auto slot_of = [&](std::int64_t segment) {  // 32 bits leave registers for loads
    return static_cast<std::int32_t>(table.first_tile(segment) * kTileSums);
  };
  const std::int32_t start = slot_of(first);
  const std::int64_t slots = slot_of(last) - start;
  const std::int64_t warps = gridDim.x * kSumWarps;
  const std::int64_t warp = blockIdx.x * kSumWarps + threadIdx.x / 32;
  const auto stop = start + static_cast<std::int32_t>(slots * (warp + 1) / warps);
  std::int32_t end = 0;  // of the segment
  SumPiece piece{};
  for (auto from = start + static_cast<std::int32_t>(slots * warp / warps); from < stop;) {
    if (from >= end) {
      const std::int64_t s = table.segment_at(from / kTileSums, first, last);
      const std::int64_t elements = table.segment(s).count;
      end = slot_of(s + 1);
      piece.segment = static_cast<std::int32_t>(s);
      piece.first = slot_of(s);
      piece.sums = elements == 0 ? 1 : static_cast<std::int32_t>(sum_blocks(elements));
    }
    piece.number = from - piece.first;
    constexpr auto terms = static_cast<std::int32_t>(kSumBlock);
    const std::int32_t sum_end = std::min(piece.sums, piece.number / terms * terms + terms);
    const std::int32_t stays = std::min(stop - from, sum_end - piece.number);
    piece.count = std::min(kMost, stays);
    piece.last = piece.count == stays;
    if (piece.count > 0) visit(piece);
    piece.before = piece.last ? 0 : piece.before + piece.count;
    from += std::max(piece.count, 1);  // a segment's last slot may be empty
  }
}

}  // namespace pycomm::cuda

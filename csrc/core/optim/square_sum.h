// Sums of squares in one fixed order, independent of the executor: a tree of fan-in 1024.
//
//   1. Within 1024 elements, lane l of 32 adds the squares of elements l, l + 32, ...
//   2. The lanes are folded: 16 onto 16, 8 onto 8, and so on.
//   3. The sums of all such blocks are added in the same way, until one is left.
//
// Sums are in double, in which the square of an fp32 number is exact and no sum of them overflows.
// So the result is finite if and only if all elements are.
#pragma once

#include "core/types.h"

namespace pycomm {

inline constexpr std::int64_t kSumBlock = 1024;
inline constexpr int kSumLanes = 32;

// Steps 1 and 2 for up to 1024 terms; missing terms count as zero.
template <class Term>
PYCOMM_HD double sum_block(std::int64_t n, const Term& term) {
  double lanes[kSumLanes] = {};
  const std::int64_t whole = n / kSumLanes * kSumLanes;
  for (std::int64_t i = 0; i < whole; i += kSumLanes) {
    PYCOMM_SIMD
    for (int l = 0; l < kSumLanes; ++l) lanes[l] += term(i + l);
  }
  for (std::int64_t i = whole; i < n; ++i) lanes[i - whole] += term(i);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    PYCOMM_SIMD
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

PYCOMM_HD constexpr std::int64_t sum_blocks(std::int64_t n) {
  return (n + kSumBlock - 1) / kSumBlock;
}

// Step 3, in place.
inline double sum_tree(double* terms, std::int64_t n) {
  if (n == 0) return 0.0;
  for (; n > 1; n = sum_blocks(n)) {
    for (std::int64_t b = 0; b < sum_blocks(n); ++b) {
      const double* block = terms + b * kSumBlock;
      const std::int64_t left = n - b * kSumBlock;
      terms[b] = sum_block(left < kSumBlock ? left : kSumBlock,
                           [block](std::int64_t i) { return block[i]; });
    }
  }
  return terms[0];
}

}  // namespace pycomm

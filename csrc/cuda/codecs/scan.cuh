// Sums over the threads of a block or a warp.
#pragma once

#include "core/codecs/topk.h"
#include "cuda/layout.h"

namespace pycomm::cuda {

// The sum over the threads of the warp up to this one. All threads of the warp call it together.
template <class T>
__device__ T sum_in_warp(T value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}

// The sum over the threads of the block before this one; `total` becomes the sum over all. All
// threads call it together.
__device__ inline std::uint64_t sum_before(std::uint64_t value, std::uint64_t& total) {
  __shared__ std::uint64_t of_warp[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const std::uint64_t sum = sum_in_warp(value);
  __syncthreads();  // all threads have read the previous values
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  std::uint64_t before = sum - value;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  return before;
}

__device__ inline std::uint64_t sum_of_all(std::uint64_t value) {
  std::uint64_t total;
  sum_before(value, total);
  return total;
}

// Calls put(i, sum of the numbers before the i-th) for n numbers; returns the sum over all. A thread
// takes neighbours, whose loads are in flight together. All threads call it together.
template <class Number, class Put>
__device__ std::uint64_t scan_all(std::int64_t n, Number number, Put put) {
  constexpr int kEach = 8;
  std::uint64_t carry = 0;
  for (std::int64_t begin = 0; begin < n; begin += kThreads * kEach) {
    const std::int64_t first = begin + threadIdx.x * kEach;
    std::uint64_t numbers[kEach], mine = 0, total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine += numbers[i] = first + i < n ? number(first + i) : 0;
    std::uint64_t before = carry + sum_before(mine, total);
    carry += total;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < n) put(first + i, before);
      before += numbers[i];
    }
  }
  return carry;
}

__device__ inline std::uint32_t sum_of_warp(std::uint32_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Counts a digit of a magnitude, if it is not zero and the digits before are `prefix`.
__device__ inline void count_digit(std::uint32_t* bins, int digit, std::uint32_t prefix,
                                   std::uint32_t size) {
  if (size == 0 || (digit > 0 && size >> digit_shift(digit - 1) != prefix)) return;
  const auto mask = static_cast<std::uint32_t>(digit_bins(digit) - 1);
  atomicAdd(&bins[size >> digit_shift(digit) & mask], 1u);
}

// Finds, from the top, the bin with the `left`-th element, and the element's number in this bin.
// Returns false if there are fewer elements.
__device__ inline bool pick_bin(const std::uint32_t* bins, int count, std::uint32_t& left,
                                std::uint32_t& bin) {
  __shared__ std::uint32_t found_bin, found_left;
  const int each = count / kThreads, top = count - static_cast<int>(threadIdx.x) * each;
  std::uint64_t mine = 0, total;
  for (int i = 1; i <= each; ++i) mine += bins[top - i];
  const std::uint64_t before = sum_before(mine, total);
  if (total < left) return false;
  if (before < left && before + mine >= left) {
    auto rest = static_cast<std::uint32_t>(left - before);
    int i = top - 1;
    while (bins[i] < rest) rest -= bins[i--];
    found_bin = static_cast<std::uint32_t>(i);
    found_left = rest;
  }
  __syncthreads();
  bin = found_bin;
  left = found_left;
  return true;
}

}  // namespace pycomm::cuda

// What a block of threads does with elements: it copies them, and reduces those of several tensors.
#pragma once

#include "core/reduce.h"

namespace pycomm::cuda {

// Reduces elements by a reduction that the compiler knows. Sums, and averages of floats, have kernels
// that do.
template <ReduceOp known>
struct Known {
  static constexpr bool kFew = true;  // registers are needed
  template <class T, class A>
  __device__ static A combined(ReduceOp, A a, A b) {
    return combine<known>(a, b);
  }
  template <class T, class A>
  __device__ static A finished(ReduceOp, A a, int ranks) {
    return finish<known>(a, ranks);
  }
};

// Looks the operation's reduction up for each element. All other reductions of a type share a kernel
// that does, because they are rare and every kernel takes time to compile. All threads take the same
// branch; the cost has not been measured.
struct LookedUp {
  static constexpr bool kFew = false;
  template <class T, class A>
  __device__ static A combined(ReduceOp op, A a, A b) {
    return visit_reduction<T>(op, [=](auto code) { return combine<decltype(code)::kOp>(a, b); });
  }
  template <class T, class A>
  __device__ static A finished(ReduceOp op, A a, int ranks) {
    return visit_reduction<T>(op, [=](auto code) { return finish<decltype(code)::kOp>(a, ranks); });
  }
};

__device__ inline bool aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
}

// Copies the whole words of `bytes` bytes; returns how many bytes these are.
template <class Word>
__device__ std::int64_t copy_words(std::byte* to, const std::byte* from, std::int64_t bytes) {
  constexpr std::int64_t kWord = sizeof(Word);
  auto* target = reinterpret_cast<Word*>(to);
  const auto* source = reinterpret_cast<const Word*>(from);
  const std::int64_t words = bytes / kWord;
  // The loads come first, because the compiler cannot know that no store changes what they read.
  constexpr int kDepth = 4;
  const std::int64_t stride = blockDim.x;
  std::int64_t i = threadIdx.x;
  for (; i + (kDepth - 1) * stride < words; i += kDepth * stride) {
    Word held[kDepth];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) held[k] = source[i + k * stride];
#pragma unroll
    for (int k = 0; k < kDepth; ++k) target[i + k * stride] = held[k];
  }
  for (; i < words; i += stride) target[i] = source[i];
  return words * kWord;
}

// Adds up tensors, or combines them by another reduction, in their order.
template <class T, class Reducer>
struct Reduction {
  ReduceOp op;
  int ranks;  // by which an average is divided
  bool last;  // nothing will be added to the result

  // Packs [begin, end) of `width` elements, which move in one access: `from` are reduced into all of `to`.
  template <int width>
  __device__ void run(std::byte* const* to, int n_to, const std::byte* const* from, int n_from,
                      std::int64_t begin, std::int64_t end) const {
    std::int64_t i = begin + threadIdx.x;
    // Two packs of each source are loaded before the first is needed, if there are registers for their
    // sums.
    if constexpr (Reducer::kFew && width * sizeof(accumulator_t<T>) <= 16) {
      for (; i + blockDim.x < end; i += 2 * blockDim.x) packs<width, 2>(to, n_to, from, n_from, i);
    }
    for (; i < end; i += blockDim.x) packs<width, 1>(to, n_to, from, n_from, i);
  }

 private:
  template <int width>
  struct alignas(width * sizeof(T)) Pack {
    T element[width];
  };

  // This thread's packs i, i + blockDim.x, ...
  template <int width, int depth>
  __device__ void packs(std::byte* const* to, int n_to, const std::byte* const* from, int n_from,
                        std::int64_t i) const {
    using A = accumulator_t<T>;
    using Packed = Pack<width>;
    A sum[depth][width];
#pragma unroll
    for (int d = 0; d < depth; ++d) {
      const auto first = reinterpret_cast<const Packed*>(from[0])[i + d * blockDim.x];
#pragma unroll
      for (int k = 0; k < width; ++k) sum[d][k] = load(first.element[k]);
    }
#pragma unroll 4
    for (int r = 1; r < n_from; ++r) {
      Packed next[depth];
#pragma unroll
      for (int d = 0; d < depth; ++d) {
        next[d] = reinterpret_cast<const Packed*>(from[r])[i + d * blockDim.x];
      }
#pragma unroll
      for (int d = 0; d < depth; ++d) {
#pragma unroll
        for (int k = 0; k < width; ++k) {
          sum[d][k] = Reducer::template combined<T>(op, sum[d][k], load(next[d].element[k]));
        }
      }
    }
#pragma unroll
    for (int d = 0; d < depth; ++d) {
      Packed result;
#pragma unroll
      for (int k = 0; k < width; ++k) {
        const A value = sum[d][k];
        result.element[k] =
            store<T>(last ? Reducer::template finished<T>(op, value, ranks) : value);
      }
      for (int j = 0; j < n_to; ++j) {
        reinterpret_cast<Packed*>(to[j])[i + d * blockDim.x] = result;
      }
    }
  }
};

}  // namespace pycomm::cuda

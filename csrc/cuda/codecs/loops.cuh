// The passes of cpu/codecs/loops.h for a block of threads, which takes 4096 elements at a time:
// eight neighbours to a thread. So a codec's block belongs to some neighbouring threads, whatever
// its size, and every element is read once. Arithmetic and order are the CPU's.
#pragma once

#include <type_traits>

#include "core/algorithms/coded.h"
#include "core/codecs/cast.h"
#include "core/codecs/feedback.h"
#include "core/codecs/table.h"
#include "cuda/layout.h"
#include "cuda/random_run.cuh"

namespace pycomm::cuda {

inline constexpr int kOctet = 8;
inline constexpr std::int64_t kBlockElements = kThreads * kOctet;
static_assert(kBlockElements == kLargestBlock);

// A thread's elements, moved in as few accesses as their address allows.
template <class T>
struct alignas(sizeof(T) * kOctet < 16 ? sizeof(T) * kOctet : 16) Octet {
  T element[kOctet];
};

// The number of this thread's elements if `left` elements remain.
__device__ inline int octet_count(std::int64_t left) {
  return left >= kOctet ? kOctet : left > 0 ? static_cast<int>(left) : 0;
}

template <class T>
__device__ bool takes_octets(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % alignof(Octet<T>) == 0;
}

template <class T>
__device__ Octet<T> load_octet(const T* from, int n) {
  if (n == kOctet && takes_octets(from)) return *reinterpret_cast<const Octet<T>*>(from);
  Octet<T> octet{};
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (i < n) octet.element[i] = from[i];
  }
  return octet;
}

template <class T>
__device__ void store_octet(T* to, const Octet<T>& octet, int n) {
  if (n == kOctet && takes_octets(to)) {
    *reinterpret_cast<Octet<T>*>(to) = octet;
    return;
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (i < n) to[i] = octet.element[i];
  }
}

// The larger magnitude, or NaN.
__device__ inline float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(std::fabs(a)), "f"(std::fabs(b)));
  return most;
#else
  return std::fabs(magnitude(a) > magnitude(b) ? a : b);
#endif
}

// The largest over `width` neighbouring threads, a power of two.
__device__ inline std::uint32_t largest_of(std::uint32_t value, int width) {
  for (int step = 1; step < width && step < 32; step *= 2) {
    const std::uint32_t other = __shfl_xor_sync(0xffffffffu, value, step);
    value = other > value ? other : value;
  }
  if (width <= 32) return value;
  __shared__ std::uint32_t of_warp[kThreads / 32];
  __syncthreads();  // all threads have read the previous values
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x) / width * (width / 32);
  for (int warp = first; warp < first + width / 32; ++warp) {
    value = of_warp[warp] > value ? of_warp[warp] : value;
  }
  return value;
}

// Random bits of this thread's eight elements; the block's first one has index `first`.
__device__ inline void draw(const Random& random, std::int64_t first, std::uint32_t* bits) {
  static_assert(kRandomRun == 32 * kOctet);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t of_warp = first + (threadIdx.x - lane) * kOctet;
  if (first % kRandomRun != 0) {
    for (int i = 0; i < kOctet; ++i) bits[i] = random_bits(random, of_warp + lane * kOctet + i);
    return;
  }
  draw_run(random, of_warp);
  const std::uint32_t* const run = words_of_warp();
#pragma unroll
  for (int i = 0; i < kOctet; ++i) bits[i] = run[lane * kOctet + i];
}

// Encodes this thread's elements from fp32. Returns whether all were finite. All threads of the
// block call it together. A codec's block has 2^shift elements; the first of this stride is element
// first() of the whole, which only random bits need.
template <class Codec, class First>
  requires Codec::kScaled
__device__ bool encode_octet(const float* v, bool stochastic, int shift, const Random& random,
                             const First& first, Octet<typename Codec::Payload>& made,
                             float& scale) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) largest = max(largest, magnitude(v[i]));
  largest = largest_of(largest, (1 << shift) / kOctet);
  const auto found = Codec::scale(largest);
  scale = found.scale;
  bool at_random = false;
  if constexpr (Codec::kStochastic) {
    at_random = stochastic;
    if (at_random) {
      std::uint32_t bits[kOctet];
      draw(random, first(), bits);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) made.element[i] = Codec::encode(v[i], found, bits[i]);
    }
  }
  if (!at_random) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) made.element[i] = Codec::encode(v[i], found);
  }
  // Processors encode values that are not finite differently.
  if (largest >= kInfinityBits) made = {};
  return largest < kInfinityBits;
}

template <class Codec, class First>
  requires(!Codec::kScaled)
__device__ bool encode_octet(const float* v, bool, int, const Random&, const First&,
                             Octet<typename Codec::Payload>& made, float&) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    made.element[i] = Codec::encode(v[i]);
    finite = finite && magnitude(Codec::decode(made.element[i], 1.0f)) < kInfinityBits;
  }
  return finite;
}

template <class Codec>
__device__ const typename Codec::Payload* payload_at(const Encoded& encoded, std::int64_t element) {
  return reinterpret_cast<const typename Codec::Payload*>(encoded.payload) + element;
}

template <class Codec>
__device__ float scale_at(const Encoded& encoded, std::int64_t element, int shift) {
  if constexpr (Codec::kScaled) {
    return encoded.scales[element >> shift];
  } else {
    return 1.0f;
  }
}

template <class Codec>
__device__ void store_encoded(const Encoded& to, std::int64_t start, int n, int shift,
                              const Octet<typename Codec::Payload>& made, float scale) {
  store_octet(reinterpret_cast<typename Codec::Payload*>(to.payload) + start, made, n);
  if (Codec::kScaled && (start & ((1 << shift) - 1)) == 0) to.scales[start >> shift] = scale;
}

// The sum of encoded contributions, which lie in slots, so that octets are aligned and have room.
// All are loaded before the first is needed.
template <class Codec>
__device__ void sum_encoded(const Pass& pass, std::int64_t start, int shift, float* v) {
#pragma unroll 4
  for (int s = 0; s < pass.n_from; ++s) {
    const Encoded& from = pass.from[s].encoded;
    const auto octet =
        *reinterpret_cast<const Octet<typename Codec::Payload>*>(payload_at<Codec>(from, start));
    const float scale = scale_at<Codec>(from, start, shift);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float value = Codec::decode(octet.element[i], scale);
      v[i] = s == 0 ? value : v[i] + value;
    }
  }
}

// The sum of contributions, one of which is the caller's own.
template <class T, class Codec>
__device__ void sum_with_own(const Pass& pass, std::int64_t start, int n, int shift, float* v) {
  for (int s = 0; s < pass.n_from; ++s) {
    const Encoded& from = pass.from[s].encoded;
    float next[kOctet];
    if (pass.from[s].own) {
      const Octet<T> x = load_octet(reinterpret_cast<const T*>(from.payload) + start, n);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) next[i] = load(x.element[i]);
      if (pass.residual != nullptr) {
        const Octet<float> residual = load_octet(pass.residual + start, n);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
          const float sum = contribution(next[i], residual.element[i], pass.scaling.scale);
          next[i] = limited(sum, pass.limit);
        }
      }
    } else {
      const auto octet = load_octet(payload_at<Codec>(from, start), n);
      const float scale = scale_at<Codec>(from, start, shift);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) next[i] = Codec::decode(octet.element[i], scale);
    }
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = s == 0 ? next[i] : v[i] + next[i];
  }
}

// Whether decoded elements are finite as Ts.
template <class T, class Codec>
__device__ bool finite_as(const float* values, int n, float scale) {
  if constexpr (Codec::kScaled) {
    return magnitude(load(store<T>(Codec::decode(Codec::kLargest, scale)))) < kInfinityBits;
  } else {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      finite = finite && (i >= n || magnitude(load(store<T>(values[i]))) < kInfinityBits);
    }
    return finite;
  }
}

// Writes output and residual of elements whose sum `v` has been encoded as `made`.
template <class T>
__device__ void store_feedback(const Pass& pass, std::int64_t start, int n, bool own,
                               const float* v, const float* made) {
  Octet<float> kept;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) kept.element[i] = made[i];
  if (pass.output != nullptr) {
    Octet<T> output;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      output.element[i] = store<T>(made[i]);
      // All ranks get the output in the tensor's type, so the residual is computed from it.
      kept.element[i] = load(output.element[i]);
    }
    store_octet(static_cast<T*>(pass.output) + start, output, n);
  }
  if (!pass.stores_residual()) return;
  const float factor = pass.divisor * pass.scaling.inverse;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) kept.element[i] = lost(v[i], kept.element[i], factor);
  if (!own) {
    const Octet<float> residual = load_octet(pass.residual + start, n);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) kept.element[i] = residual.element[i] + kept.element[i];
  }
  store_octet(pass.residual + start, kept, n);
}

// From element `begin` of a pass on, which begins a block. Returns, to each thread, whether one of its
// elements is not finite.
template <class T, class Codec>
__device__ bool encode_blocks(const Pass& pass, std::int64_t begin, bool own, bool stochastic,
                              int shift) {
  using Payload = typename Codec::Payload;
  bool finite = true;
  for (std::int64_t stride = begin; stride < pass.n; stride += kBlockElements) {
    const std::int64_t start = stride + threadIdx.x * kOctet;
    const int n = octet_count(pass.n - start);
    float v[kOctet] = {};
    if (n > 0) {
      if (own) {
        sum_with_own<T, Codec>(pass, start, n, shift, v);
      } else {
        sum_encoded<Codec>(pass, start, shift, v);
      }
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        v[i] = i >= n ? 0.0f : pass.last ? v[i] / pass.divisor : v[i];
      }
    }
    Octet<Payload> made;
    float scale = 1.0f;
    const auto first = [&] { return pass.first + stride; };
    finite &= encode_octet<Codec>(v, stochastic, shift, pass.random, first, made, scale);
    __syncwarp();  // all lanes have read the scales that may have been there
    if (n == 0) continue;
    store_encoded<Codec>(pass.to, start, n, shift, made, scale);
    float values[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = Codec::decode(made.element[i], scale);
    if (pass.output != nullptr) finite &= finite_as<T, Codec>(values, n, scale);
    store_feedback<T>(pass, start, n, own, v, values);
  }
  return !finite;
}

// output[i] = decoded, or += decoded, from element `begin` on.
template <class T, class Codec, bool add>
__device__ bool decode_blocks(const Encoded& from, T* output, std::int64_t begin,
                              std::int64_t count, int shift) {
  bool finite = true;
  for (std::int64_t start = begin + threadIdx.x * kOctet; start < count; start += kBlockElements) {
    const int n = octet_count(count - start);
    const auto octet = load_octet(payload_at<Codec>(from, start), n);
    const float scale = scale_at<Codec>(from, start, shift);
    float values[kOctet];
    Octet<T> decoded;
    if constexpr (add) decoded = load_octet(output + start, n);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      values[i] = Codec::decode(octet.element[i], scale);
      if constexpr (add) {
        decoded.element[i] += values[i];
      } else {
        decoded.element[i] = store<T>(values[i]);
      }
    }
    finite &= finite_as<T, Codec>(values, n, scale);
    store_octet(output + start, decoded, n);
  }
  return !finite;
}

}  // namespace pycomm::cuda

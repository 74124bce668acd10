// The loops that encode, decode and add blocks, as templates of an element's arithmetic
// (core/codecs/table.h). loops.cpp compiles them for the codecs of the library.
//
// A pass takes blocks through the first-level cache: it adds the sources, encodes the sum, and
// decodes it again for the output and the residual. Nothing else is read or written.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/codecs/feedback.h"
#include "core/codecs/table.h"
#include "core/layout.h"
#include "cpu/codecs/loops.h"
#include "cpu/executor/loops.h"
#include "cpu/executor/random_run.h"

namespace pycomm::cpu {
namespace detail {

// Elements that a codec without blocks takes through the cache at a time.
inline constexpr std::int64_t kUnscaledRun = 1024;

// Random bits in whole runs of counters; blocks begin at multiples of half a run.
PYCOMM_HD void draw(const Random& random, std::int64_t first, std::int64_t n, std::uint32_t* bits) {
  if (first % kRandomRun != 0 || n % kRandomRun != 0) {
    for (std::int64_t i = 0; i < n; ++i) bits[i] = random_bits(random, first + i);
    return;
  }
  for (std::int64_t run = 0; run < n; run += kRandomRun)
    random_run(random, first + run, bits + run);
}

// Encodes n elements of a block, from fp32. Returns whether all were finite.
template <class Codec, bool stochastic>
  requires Codec::kScaled
PYCOMM_HD bool encode_block(const float* v, std::int64_t n, typename Codec::Payload* to,
                            float* scale, const Random& random, std::int64_t first) {
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(v[i]));
  const auto made = Codec::scale(largest);
  *scale = made.scale;
  if constexpr (stochastic) {
    std::uint32_t bits[kLargestBlock];
    draw(random, first, n, bits);
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) to[i] = Codec::encode(v[i], made, bits[i]);
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) to[i] = Codec::encode(v[i], made);
  }
  if (largest < kInfinityBits) return true;
  std::fill(to, to + n, typename Codec::Payload{});  // processors encode a NaN differently
  return false;
}

template <class Codec, bool>
  requires(!Codec::kScaled)
PYCOMM_HD bool encode_block(const float* v, std::int64_t n, typename Codec::Payload* to, float*,
                            const Random&, std::int64_t) {
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = Codec::encode(v[i]);
    largest = std::max(largest, magnitude(Codec::decode(to[i], 1.0f)));
  }
  return largest < kInfinityBits;
}

template <class Codec>
struct View {
  const typename Codec::Payload* payload;
  float scale;

  PYCOMM_HD View(const Encoded& encoded, std::int64_t start, std::int64_t block)
      : payload(reinterpret_cast<const typename Codec::Payload*>(encoded.payload) + start),
        scale(Codec::kScaled ? encoded.scales[start / block] : 1.0f) {}
  PYCOMM_HD float operator[](std::int64_t i) const { return Codec::decode(payload[i], scale); }
};

// How far ahead of the current block to prefetch.
inline constexpr std::int64_t kPrefetchBytes = 8192;

// magnitude() of the largest of n decoded elements, as a T.
template <class T, class Codec>
PYCOMM_HD std::uint32_t largest_stored(const View<Codec>& view, std::int64_t n) {
  if constexpr (Codec::kScaled) {
    return magnitude(load(store<T>(Codec::decode(Codec::kLargest, view.scale))));
  } else {
    std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (std::int64_t i = 0; i < n; ++i) {
      largest = std::max(largest, magnitude(load(store<T>(view[i]))));
    }
    return largest;
  }
}

template <class T>
PYCOMM_HD void load_own(const Pass& pass, const T* x, std::int64_t start, std::int64_t n,
                        float* v) {
  if (pass.residual == nullptr) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) v[i] = load(x[start + i]);
    return;
  }
  const float* residual = pass.residual + start;
  const float scale = pass.scaling.scale;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) v[i] = contribution(load(x[start + i]), residual[i], scale);
  if (pass.limit == kInfinity) return;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) v[i] = limited(v[i], pass.limit);
}

PYCOMM_HD bool is_power_of_two(float value) { return (magnitude(value) & 0x7fffffu) == 0; }

PYCOMM_HD void divide(float* v, std::int64_t n, float divisor) {
  if (divisor == 1.0f) return;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) v[i] /= divisor;
}

// Adds one source to `sum`, or begins with it.
template <class T, class Codec>
PYCOMM_HD void add_source(const Pass& pass, const Source& source, bool begin, std::int64_t start,
                          std::int64_t n, std::int64_t block, float* sum) {
  if (source.own) {
    const T* x = reinterpret_cast<const T*>(source.encoded.payload);
    float own[kLargestBlock];
    load_own(pass, x, start, n, begin ? sum : own);
    if (begin) return;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) sum[i] += own[i];
    return;
  }
  const View<Codec> view(source.encoded, start, block);
  if (begin) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) sum[i] = view[i];
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) sum[i] += view[i];
  }
}

// The divided sum of the sources for n elements from `start`: in `buffer`, or in place if there is
// nothing to add.
template <class T, class Codec>
PYCOMM_HD const float* sum_sources(const Pass& pass, std::int64_t start, std::int64_t n,
                                   std::int64_t block, float* buffer) {
  const Source* from = pass.from;
  if constexpr (std::is_same_v<T, float>) {
    if (pass.n_from == 1 && from[0].own && pass.residual == nullptr && !pass.last) {
      const float* x = reinterpret_cast<const float*>(from[0].encoded.payload) + start;
      prefetch(reinterpret_cast<const std::byte*>(x) + kPrefetchBytes, n * 4);
      return x;
    }
  }
  const float divisor = pass.last ? pass.divisor : 1.0f;
  if (pass.n_from == 2 && !from[0].own && !from[1].own && is_power_of_two(divisor)) {
    // Two ranks: one pass. Multiplying by the inverse of a power of two is an exact division.
    const View<Codec> a(from[0].encoded, start, block), b(from[1].encoded, start, block);
    const float inverse = 1.0f / divisor;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = (a[i] + b[i]) * inverse;
    return buffer;
  }
  for (int s = 0; s < pass.n_from; ++s) {
    add_source<T, Codec>(pass, from[s], s == 0, start, n, block, buffer);
  }
  divide(buffer, n, divisor);
  return buffer;
}

// The output as fp32, from which residuals are computed.
template <class T>
struct Stored {
  const T* data;
  PYCOMM_HD float operator[](std::int64_t i) const { return load(data[i]); }
};

template <class Sent>
PYCOMM_HD void keep_lost(float* residual, bool begin, const float* v, const Sent& sent,
                         std::int64_t n, float factor) {
  if (begin) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) residual[i] = lost(v[i], sent[i], factor);
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) residual[i] += lost(v[i], sent[i], factor);
  }
}

// Writes output and residual of n elements whose sum `v` has been encoded as `made`. All ranks get
// the output in the tensor's type, so the residual is computed from that.
template <class T, class Codec>
PYCOMM_HD void store_feedback(const Pass& pass, std::int64_t start, std::int64_t n, bool own,
                              const float* v, const View<Codec>& made) {
  T* output = static_cast<T*>(pass.output) + start;
  if (pass.output != nullptr) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) output[i] = store<T>(made[i]);
  }
  if (!pass.stores_residual()) return;
  float* residual = pass.residual + start;
  const float factor = pass.divisor * pass.scaling.inverse;
  if (pass.output != nullptr) {
    keep_lost(residual, own, v, Stored<T>{output}, n, factor);
  } else {
    keep_lost(residual, own, v, made, n, factor);
  }
}

template <class T, class Codec, bool stochastic>
PYCOMM_CLONES bool encode_blocks(const Pass& pass, std::int64_t block) {
  using Payload = typename Codec::Payload;
  float buffer[kLargestBlock];
  bool own = false, finite = true;
  for (int s = 0; s < pass.n_from; ++s) own = own || pass.from[s].own;
  const std::int64_t stride = Codec::kScaled ? block : kUnscaledRun;
  for (std::int64_t start = 0; start < pass.n; start += stride) {
    const std::int64_t n = std::min(stride, pass.n - start);
    const float* v = sum_sources<T, Codec>(pass, start, n, block, buffer);
    finite &= encode_block<Codec, stochastic>(
        v, n, reinterpret_cast<Payload*>(pass.to.payload) + start,
        pass.to.scales + (Codec::kScaled ? start / block : 0), pass.random, pass.first + start);
    const View<Codec> made(pass.to, start, block);
    if (pass.output != nullptr) finite &= largest_stored<T>(made, n) < kInfinityBits;
    store_feedback<T, Codec>(pass, start, n, own, v, made);
  }
  return !finite;
}

template <class T, class Codec>
PYCOMM_CLONES bool sum_blocks(const Pass& pass, std::int64_t block) {
  float buffer[kLargestBlock];
  std::uint32_t largest = 0;
  const std::int64_t stride = Codec::kScaled ? block : kUnscaledRun;
  for (std::int64_t start = 0; start < pass.n; start += stride) {
    const std::int64_t n = std::min(stride, pass.n - start);
    const float* v = sum_sources<T, Codec>(pass, start, n, block, buffer);
    T* output = static_cast<T*>(pass.output) + start;
#pragma omp simd reduction(max : largest)
    for (std::int64_t i = 0; i < n; ++i) {
      output[i] = store<T>(v[i]);
      largest = std::max(largest, magnitude(load(output[i])));
    }
    if (pass.stores_residual()) {
      keep_lost(pass.residual + start, false, v, Stored<T>{output}, n,
                pass.divisor * pass.scaling.inverse);
    }
  }
  return largest >= kInfinityBits;
}

template <class T, class Codec, bool add>
PYCOMM_CLONES bool decode_blocks(const Encoded& from, void* output, std::int64_t count,
                                 std::int64_t block) {
  T* to = static_cast<T*>(output);
  std::uint32_t largest = 0;
  const std::int64_t stride = Codec::kScaled ? block : kUnscaledRun;
  for (std::int64_t start = 0; start < count; start += stride) {
    const std::int64_t n = std::min(stride, count - start);
    const View<Codec> view(from, start, block);
    T* y = to + start;
    if constexpr (add) {
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) y[i] += view[i];
    } else {
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) y[i] = store<T>(view[i]);
    }
    largest = std::max(largest, largest_stored<T>(view, n));
  }
  return largest >= kInfinityBits;
}

template <class T>
PYCOMM_CLONES std::uint32_t largest_contribution(const void* input, const float* residual,
                                                 float scale, std::int64_t n) {
  const T* x = static_cast<const T*>(input);
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, magnitude(contribution(load(x[i]), residual[i], scale)));
  }
  return largest;
}

template <class T, class Codec, bool stochastic>
CodecLoops loops_of() {
  return {
      encode_blocks<T, Codec, stochastic>, sum_blocks<T, Codec>,    decode_blocks<T, Codec, false>,
      decode_blocks<float, Codec, true>,   largest_contribution<T>, Codec::kScaled};
}

template <class T, class Codecs>
CodecLoops loops_for(const Codec& codec) {
  CodecLoops loops{};
  const bool known = Codecs::visit(codec, [&](auto type) {
    using Elements = typename decltype(type)::type;
    if constexpr (Elements::kStochastic) {
      loops =
          codec.stochastic != 0 ? loops_of<T, Elements, true>() : loops_of<T, Elements, false>();
    } else {
      loops = loops_of<T, Elements, false>();
    }
  });
  PYCOMM_CHECK(known, "a codec that works on blocks is needed, got " + describe(codec));
  return loops;
}

}  // namespace detail

// codec_loops() for the codecs of a table.
template <class Codecs>
CodecLoops block_loops(DType dtype, const Codec& codec) {
  switch (dtype) {
    case DType::f32:
      return detail::loops_for<float, Codecs>(codec);
    case DType::f16:
      return detail::loops_for<Half, Codecs>(codec);
    case DType::bf16:
      return detail::loops_for<BFloat16, Codecs>(codec);
    default:
      PYCOMM_CHECK(false, std::string("tensor must be float32, float16 or bfloat16 to be "
                                      "compressed, got ") +
                              name_of(dtype));
  }
}

}  // namespace pycomm::cpu

#include "cpu/executor/loops.h"

#include <algorithm>
#include <cstring>

#include "core/layout.h"
#include "core/reduce.h"

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#endif

namespace pycomm::cpu {
namespace {

// The number of accumulators that stay in the first-level cache.
constexpr std::int64_t kBlock = 1024;
constexpr std::int64_t kBlockBytes = 4096;

template <class T, ReduceOp op>
PYCOMM_CLONES void reduce_elements(void* to_bytes, const void* const* from_bytes, int n_from,
                                   std::int64_t begin, std::int64_t count, int ranks) {
  using A = accumulator_t<T>;
  T* to = static_cast<T*>(to_bytes);
  const auto from = [&](int r) { return static_cast<const T*>(from_bytes[r]) + begin; };
  const T* a = from(0);

  if (n_from == 1) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) to[i] = store<T>(finish<op>(load(a[i]), ranks));
    return;
  }
  const T* b = from(1);
  if (n_from == 2) {
#pragma omp simd
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = store<T>(finish<op>(combine<op>(load(a[i]), load(b[i])), ranks));
    }
    return;
  }
  A sum[kBlock];
  for (std::int64_t start = 0; start < count; start += kBlock) {
    const std::int64_t n = std::min(kBlock, count - start);
    a = from(0) + start;
    b = from(1) + start;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) sum[i] = combine<op>(load(a[i]), load(b[i]));
    for (int r = 2; r < n_from; ++r) {
      const T* next = from(r) + start;
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i) sum[i] = combine<op>(sum[i], load(next[i]));
    }
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) to[start + i] = store<T>(finish<op>(sum[i], ranks));
  }
}

#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)

void stream_lines(std::byte* to, const std::byte* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    const auto* line = reinterpret_cast<const __m128i*>(from + i);
    auto* target = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

#else

void stream_lines(std::byte* to, const std::byte* from, std::int64_t bytes) {
  std::memcpy(to, from, bytes);
}

#endif

std::int64_t bytes_to_line(const std::byte* p) {
  return static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(p) & (kLine - 1));
}

}  // namespace

ReduceLoop reduce_loop(DType dtype, ReduceOp op, bool last) {
  if (op == ReduceOp::avg && !last) op = ReduceOp::sum;  // a later call divides
  return visit_dtype(dtype, [&](auto element) {
    return visit_reduction<decltype(element)>(op, [](auto code) -> ReduceLoop {
      return reduce_elements<typename decltype(code)::type, decltype(code)::kOp>;
    });
  });
}

void stream_fence() {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  _mm_sfence();
#endif
}

void copy(Target to, const std::byte* from, std::int64_t bytes) {
  if (!to.stream || bytes < 2 * kLine) {
    std::memcpy(to.data, from, bytes);
    return;
  }
  const std::int64_t head = bytes_to_line(to.data);
  const std::int64_t lines = (bytes - head) / kLine * kLine;
  std::memcpy(to.data, from, head);
  stream_lines(to.data + head, from + head, lines);
  std::memcpy(to.data + head + lines, from + head + lines, bytes - head - lines);
}

void zero(float* to, std::int64_t n) { std::fill_n(to, n, 0.0f); }

void reduce(ReduceLoop loop, const Target* to, int n_to, const void* const* from, int n_from,
            std::int64_t count, std::int64_t element_size, int ranks) {
  if (n_to == 1 && !to[0].stream) {
    loop(to[0].data, from, n_from, 0, count, ranks);
    return;
  }
  // Each block is computed in the first-level cache and stored from there. The first block ends at
  // a cache line boundary of the first target, so that streamed stores fill whole lines.
  alignas(kLine) std::byte made[kBlockBytes];
  std::int64_t n = (kBlockBytes - kLine + bytes_to_line(to[0].data)) / element_size;
  for (std::int64_t begin = 0; begin < count; begin += n, n = kBlockBytes / element_size) {
    n = std::min(n, count - begin);
    loop(made, from, n_from, begin, n, ranks);
    for (int i = 0; i < n_to; ++i) {
      copy({to[i].data + begin * element_size, to[i].stream}, made, n * element_size);
    }
  }
}

}  // namespace pycomm::cpu

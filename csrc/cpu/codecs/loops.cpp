#include "cpu/codecs/loops.h"

#include <algorithm>

#include "core/codecs/feedback.h"
#include "cpu/codecs/block_loops.h"

namespace pycomm::cpu {
namespace {

// Elements between two checks of `largest`.
constexpr std::int64_t kRun = 1024;

template <class T>
bool all_zero(const T* x, std::int64_t n) {
  std::uint32_t largest = 0;
  for (std::int64_t start = 0; start < n && largest == 0; start += kRun) {
    const std::int64_t end = std::min(start + kRun, n);
#pragma omp simd reduction(max : largest)
    for (std::int64_t i = start; i < end; ++i) largest = std::max(largest, magnitude(load(x[i])));
  }
  return largest == 0;
}

template <class T>
PYCOMM_CLONES std::uint32_t narrow(const float* from, void* made, std::int64_t n, float* lost_there,
                                   float factor) {
  T* const to = static_cast<T*>(made);
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    to[i] = store<T>(from[i]);
    largest = std::max(largest, magnitude(load(to[i])));
  }
  if (lost_there == nullptr) return largest;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) lost_there[i] += lost(from[i], load(to[i]), factor);
  return largest;
}

}  // namespace

NarrowLoop narrow_loop(DType dtype) {
  return dtype == DType::f16    ? narrow<Half>
         : dtype == DType::bf16 ? narrow<BFloat16>
                                : narrow<float>;
}

bool all_zero(DType dtype, const void* x, std::int64_t n) {
  switch (dtype) {
    case DType::f16:
      return all_zero(static_cast<const Half*>(x), n);
    case DType::bf16:
      return all_zero(static_cast<const BFloat16*>(x), n);
    default:
      return all_zero(static_cast<const float*>(x), n);
  }
}

CodecLoops codec_loops(DType dtype, const Codec& codec) {
  return block_loops<BlockCodecs>(dtype, codec);
}

}  // namespace pycomm::cpu

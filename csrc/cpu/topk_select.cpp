#include "cpu/topk_select.h"

#include "core/reduce.h"
#include "cpu/loops.h"

namespace pycomm::cpu {
namespace {

static_assert(kTopkChunk % kStretch == 0);

// More candidates than that are not collected before another digit has thinned them out: their list
// takes a sixteenth of an fp32 tensor.
std::int64_t most_collected(std::int64_t n, std::int64_t k) {
  return std::max(2 * k + (64 << 10), n / 32);
}

constexpr std::int64_t kAhead = 8192;

PYCOMM_HD void store_unscaled(const float* values, std::int64_t n, const Scaling& scaling,
                              float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = values[i] * scaling.inverse;
}

struct Stretch {
  const float* values;
  std::uint32_t largest;  // magnitude()
};

// `n` candidates from `start`, in `buffer` or where they lie already, and a byte for each that says
// whether it is at least `least`. Where `store`, they replace residual and velocity.
template <class T>
PYCOMM_CLONES Stretch load_stretch(const Candidates& from, std::int64_t start, std::int64_t n,
                                   bool store, std::uint32_t least, float* buffer,
                                   std::uint8_t* hits) {
  const T* x = static_cast<const T*>(from.x) + start;
  const float* values = buffer;
  if (from.velocity != nullptr) {
    float* velocity = from.velocity + start;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) {
      buffer[i] = accelerated(velocity[i], from.momentum, load(x[i]), from.scaling.scale);
    }
    if (store) store_unscaled(buffer, n, from.scaling, velocity);
  } else if (std::is_same_v<T, float> && from.residual == nullptr) {
    values = reinterpret_cast<const float*>(x);
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = load(x[i]);
  }
  if (from.residual != nullptr) {
    float* residual = from.residual + start;
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) {
      buffer[i] = contribution(buffer[i], residual[i], from.scaling.scale);
    }
    if (store) store_unscaled(buffer, n, from.scaling, residual);
  }
  // While this stretch's hits are visited, memory must not pause.
  prefetch(reinterpret_cast<const std::byte*>(x) + kAhead,
           n * static_cast<std::int64_t>(sizeof(T)));
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t size = magnitude(values[i]);
    largest = std::max(largest, size);
    hits[i] = size >= least ? 1 : 0;
  }
  return {values, largest};
}

// Calls visit(index, value) for candidates of at least `least`, and after_chunk() now and then,
// which may raise it. Returns the largest magnitude().
template <class Visit, class AfterChunk>
std::uint32_t scan(const Candidates& from, bool store, const std::uint32_t& least, Visit visit,
                   AfterChunk after_chunk) {
  const auto load = from.dtype == DType::f32   ? load_stretch<float>
                    : from.dtype == DType::f16 ? load_stretch<Half>
                                               : load_stretch<BFloat16>;
  float buffer[kStretch];
  Hits hits;
  std::uint32_t largest = 0;
  for (std::int64_t start = 0; start < from.n; start += kStretch) {
    const std::int64_t n = std::min(kStretch, from.n - start);
    const Stretch stretch = load(from, start, n, store, least, buffer, hits.bytes);
    largest = std::max(largest, stretch.largest);
    hits.each(n, [&](std::int64_t i) { visit(start + i, stretch.values[i]); });
    if ((start + kStretch) % kTopkChunk == 0) after_chunk();
  }
  return largest;
}

}  // namespace

PYCOMM_CLONES void mark_nonzero(const float* values, std::int64_t n, std::uint8_t* hits) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) hits[i] = magnitude(values[i]) != 0 ? 1 : 0;
}

std::uint32_t TopkSelection::prepare(const Candidates& from, std::int64_t k) {
  k_ = k;
  floor_ = 1;
  ties_ = -1;
  counts_.assign(digit_bins(0), 0);
  std::int64_t counted = 0;
  // The bin in which the k-th largest of those seen so far lies; lower ones can be forgotten.
  const auto raise_floor = [&] {
    std::int64_t above = 0;
    for (int bin = digit_bins(0) - 1; bin >= 0; --bin) {
      above += counts_[static_cast<std::size_t>(bin)];
      if (above < k) continue;
      floor_ = std::max(floor_, static_cast<std::uint32_t>(bin) << digit_shift(0));
      break;
    }
    collectable_ = above;
  };
  const std::uint32_t largest = scan(
      from, false, floor_,
      [&](std::int64_t, float value) {
        ++counts_[magnitude(value) >> digit_shift(0)];
        ++counted;
      },
      raise_floor);
  raise_floor();
  if (k == 0 || counted == 0) floor_ = 0xffffffffu;
  const std::int64_t most = most_collected(from.n, k);
  for (int digit = 1; digit < kDigits && collectable_ > most && counted > 0; ++digit) {
    count_digit(from, digit);
  }
  return largest;
}

// Thins out the lowest bin that is collected.
void TopkSelection::count_digit(const Candidates& from, int digit) {
  const int shift = digit_shift(digit), bits = digit_shift(digit - 1);
  const std::uint32_t prefix = floor_ >> bits;
  std::int64_t above = 0;  // that bin
  counts_.assign(static_cast<std::size_t>(digit_bins(digit)), 0);
  scan(
      from, false, floor_,
      [&](std::int64_t, float value) {
        const std::uint32_t size = magnitude(value);
        if (size >> bits != prefix) {
          ++above;
        } else {
          ++counts_[size >> shift & static_cast<std::uint32_t>(digit_bins(digit) - 1)];
        }
      },
      [] {});
  for (int bin = digit_bins(digit) - 1; bin >= 0; --bin) {
    const std::int64_t here = counts_[static_cast<std::size_t>(bin)];
    if (above + here >= k_ || bin == 0) {
      floor_ = std::max(floor_, prefix << bits | static_cast<std::uint32_t>(bin) << shift);
      collectable_ = above + here;
      if (shift == 0) ties_ = k_ - above;
      return;
    }
    above += here;
  }
}

void TopkSelection::collect(const Candidates& from, bool store) {
  entries_.clear();
  std::int64_t ties = ties_;
  scan(
      from, store, floor_,
      [&](std::int64_t i, float value) {
        if (ties_ >= 0 && magnitude(value) == floor_ && ties-- <= 0) return;
        entries_.push_back({static_cast<std::uint32_t>(i), value});
      },
      [] {});
  keep_largest(entries_, k_, magnitudes_, [](const Entry&) {});
}

}  // namespace pycomm::cpu

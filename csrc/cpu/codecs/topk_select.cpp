#include "cpu/codecs/topk_select.h"

#include <cmath>

#include "core/reduce.h"
#include "cpu/executor/loops.h"

namespace pycomm::cpu {
namespace {

static_assert(kTopkChunk % kStretch == 0);

// With more candidates, another digit is counted first to reduce them: at this limit their list takes a
// sixteenth of an fp32 tensor.
std::int64_t most_collected(std::int64_t n, std::int64_t k) {
  return std::max(2 * k + (64 << 10), n / 32);
}

constexpr std::int64_t kPrefetchBytes = 8192;

// The sample has one element in kSampledOneIn, at most kLargestSample.
constexpr std::int64_t kSampledOneIn = 128, kLargestSample = 64 << 10;

// No magnitude.
constexpr std::uint32_t kNone = 0xffffffffu;

// x, or the new velocity if there is one.
template <class T>
PYCOMM_HD float accelerated_at(const Candidates& from, std::int64_t i) {
  const float x = load(static_cast<const T*>(from.x)[i]);
  if (from.velocity == nullptr) return x;
  return accelerated(from.velocity[i], from.momentum, x, from.scaling.scale);
}

template <class T>
PYCOMM_HD float candidate(const Candidates& from, std::int64_t i) {
  const float value = accelerated_at<T>(from, i);
  if (from.residual == nullptr) return value;
  return limited(contribution(value, from.residual[i], from.scaling.scale), from.limit);
}

struct Stretch {
  const float* values;
  std::uint32_t largest;  // magnitude()
};

// Loads `n` candidates from `start` into `buffer`, or points to them in place, and writes a byte for
// each: 1 if its magnitude is at least `least`.
template <class T>
PYCOMM_CLONES Stretch load_stretch(const Candidates& from, std::int64_t start, std::int64_t n,
                                   std::uint32_t least, float* buffer, std::uint8_t* hits) {
  const Candidates all = from;  // a copy, which stores to `buffer` cannot change
  const bool in_place =
      std::is_same_v<T, float> && all.residual == nullptr && all.velocity == nullptr;
  const float* values = in_place ? static_cast<const float*>(all.x) + start : buffer;
  if (!in_place) {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = candidate<T>(all, start + i);
  }
  // Prefetches the next run, so that memory stays busy while this run's hits are visited.
  const auto prefetch_next = [&](const void* data, std::int64_t element) {
    if (data == nullptr) return;
    prefetch(static_cast<const std::byte*>(data) + start * element + kPrefetchBytes, n * element);
  };
  prefetch_next(all.x, sizeof(T));
  prefetch_next(all.residual, sizeof(float));
  prefetch_next(all.velocity, sizeof(float));
  std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t size = magnitude(values[i]);
    largest = std::max(largest, size);
    hits[i] = size >= least ? 1 : 0;
  }
  return {values, largest};
}

// Replaces residual and velocity by the candidates. Alone, this runs at the speed of memory.
template <class T>
PYCOMM_CLONES void store_candidates(const Candidates& from) {
  const Candidates all = from;
  const float inverse = all.scaling.inverse;
#pragma omp simd
  for (std::int64_t i = 0; i < all.n; ++i) {
    const float value = accelerated_at<T>(all, i);
    const float left = contribution(value, all.residual[i], all.scaling.scale);
    if (all.velocity != nullptr) all.velocity[i] = value * inverse;
    all.residual[i] = left * inverse;
  }
}

// Calls visit(index, value) for candidates of at least `least`, and from time to time after_chunk(),
// which may raise `least`. Returns the largest magnitude().
template <class Visit, class AfterChunk>
std::uint32_t scan(const Candidates& from, const std::uint32_t& least, Visit visit,
                   AfterChunk after_chunk) {
  const auto load = from.dtype == DType::f32   ? load_stretch<float>
                    : from.dtype == DType::f16 ? load_stretch<Half>
                                               : load_stretch<BFloat16>;
  float buffer[kStretch];
  Hits hits;
  std::uint32_t largest = 0;
  for (std::int64_t start = 0; start < from.n; start += kStretch) {
    const std::int64_t n = std::min(kStretch, from.n - start);
    const Stretch stretch = load(from, start, n, least, buffer, hits.bytes);
    largest = std::max(largest, stretch.largest);
    hits.each(n, [&](std::int64_t i) { visit(start + i, stretch.values[i]); });
    if ((start + kStretch) % kTopkChunk == 0) after_chunk();
  }
  return largest;
}

// A magnitude that at least k candidates almost certainly reach, and not many more. If k of n elements
// reach it, m p +- 4 sqrt(m p) of m sampled ones should, with p = k / n.
std::uint32_t guess_floor(const Candidates& from, std::int64_t k,
                          std::vector<std::uint32_t>& magnitudes) {
  const std::int64_t sampled = std::min(from.n / kSampledOneIn, kLargestSample);
  const double expected = static_cast<double>(sampled) * static_cast<double>(k) /
                          static_cast<double>(std::max<std::int64_t>(from.n, 1));
  const auto rank = static_cast<std::int64_t>(expected + 4 * std::sqrt(expected) + 4);
  if (rank >= sampled) return 1;
  const auto value = from.dtype == DType::f32   ? candidate<float>
                     : from.dtype == DType::f16 ? candidate<Half>
                                                : candidate<BFloat16>;
  const std::int64_t stride = (from.n / sampled - 1) | 1;  // odd, unlike most row lengths
  magnitudes.clear();
  for (std::int64_t i = 0; i < sampled; ++i)
    magnitudes.push_back(magnitude(value(from, i * stride)));
  const auto at = magnitudes.begin() + rank;
  std::nth_element(magnitudes.begin(), at, magnitudes.end(), std::greater<>());
  return std::max(*at, 1u);
}

}  // namespace

PYCOMM_CLONES void mark_nonzero(const float* values, std::int64_t n, std::uint8_t* hits) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) hits[i] = magnitude(values[i]) != 0 ? 1 : 0;
}

std::uint32_t TopkSelection::prepare(const Candidates& from, std::int64_t k) {
  k_ = k;
  ties_ = -1;
  floor_ = k == 0 ? kNone : guess_floor(from, k, magnitudes_);
  collected_ = true;
  entries_.clear();
  const auto found = [&] { return static_cast<std::int64_t>(entries_.size()); };
  const std::int64_t most = most_collected(from.n, k);
  std::uint32_t least = floor_;
  const std::uint32_t largest = scan(
      from, least,
      [&](std::int64_t i, float value) {
        entries_.push_back({static_cast<std::uint32_t>(i), value});
      },
      [&] { least = found() > most ? kNone : least; });
  if (found() > most) {
    count(from);
  } else if (found() < k && floor_ > 1) {
    floor_ = 1;
    count(from);
  }
  return largest;
}

// Raises floor_ as far as it can while k candidates remain.
void TopkSelection::count(const Candidates& from) {
  collected_ = false;
  counts_.assign(static_cast<std::size_t>(digit_bins(0)), 0);
  // The bin of the k-th largest candidate so far; lower bins can be dropped.
  const auto raise_floor = [&] {
    std::int64_t above = 0;
    for (int bin = digit_bins(0) - 1; bin >= 0; --bin) {
      above += counts_[static_cast<std::size_t>(bin)];
      if (above < k_) continue;
      floor_ = std::max(floor_, static_cast<std::uint32_t>(bin) << digit_shift(0));
      break;
    }
    collectable_ = above;
  };
  scan(
      from, floor_,
      [&](std::int64_t, float value) { ++counts_[magnitude(value) >> digit_shift(0)]; },
      raise_floor);
  raise_floor();
  const std::int64_t most = most_collected(from.n, k_);
  for (int digit = 1; digit < kDigits && collectable_ > most; ++digit) count_digit(from, digit);
}

// Counts another digit of the lowest bin that is collected, to drop a part of it.
void TopkSelection::count_digit(const Candidates& from, int digit) {
  const int shift = digit_shift(digit), bits = digit_shift(digit - 1);
  const std::uint32_t prefix = floor_ >> bits;
  std::int64_t above = 0;  // candidates above that bin
  counts_.assign(static_cast<std::size_t>(digit_bins(digit)), 0);
  scan(
      from, floor_,
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

void TopkSelection::collect(const Candidates& from) {
  if (!collected_) {
    entries_.clear();
    std::int64_t ties = ties_;
    scan(
        from, floor_,
        [&](std::int64_t i, float value) {
          if (ties_ >= 0 && magnitude(value) == floor_ && ties-- <= 0) return;
          entries_.push_back({static_cast<std::uint32_t>(i), value});
        },
        [] {});
  }
  keep_largest(entries_, k_, magnitudes_, [](const Entry&) {});
}

void store_values(const Candidates& from) {
  const auto store = from.dtype == DType::f32   ? store_candidates<float>
                     : from.dtype == DType::f16 ? store_candidates<Half>
                                                : store_candidates<BFloat16>;
  store(from);
}

}  // namespace pycomm::cpu

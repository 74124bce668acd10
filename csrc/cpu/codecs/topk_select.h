// Exact selection of the k largest of n elements, mostly in one pass over memory.
//
//   1. prepare(): a sample gives a magnitude that slightly more than k elements reach, and collects all
//      elements that reach it. They are few, so the pass needs a test per 64 elements and runs at the
//      speed of memory.
//   2. collect(): cuts the list to exactly k.
//
// With a residual, store_values() then takes another pass, which writes residual and velocity. It comes
// after all ranks have found out whether they may change theirs.
//
// If the sample misleads (fewer than k are found, or far too many because many are equal), prepare()
// counts instead: a histogram of the top bits gives the bin of the k-th largest magnitude, and further
// digits split a bin that too many share. collect() then takes another pass.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <vector>

#include "core/codecs/feedback.h"
#include "core/codecs/topk.h"

namespace pycomm::cpu {

// The number of elements that fit into the first-level cache.
inline constexpr std::int64_t kStretch = 1024;

// A byte for each element of a run: 1 if it is selected.
struct Hits {
  std::uint8_t bytes[kStretch];

  // Visits the indices of the selected ones among the first n; they are few.
  template <class Visit>
  void each(std::int64_t n, Visit visit) {
    static_assert(std::endian::native == std::endian::little);
    std::fill_n(bytes + n, (kStretch - n) % 32, std::uint8_t{0});
    for (std::int64_t i = 0; i < n; i += 32) {
      std::uint64_t eights[4];
      std::memcpy(eights, bytes + i, sizeof(eights));
      if ((eights[0] | eights[1] | eights[2] | eights[3]) == 0) continue;
      for (int w = 0; w < 4; ++w) {
        for (std::uint64_t rest = eights[w]; rest != 0; rest &= rest - 1) {
          visit(i + w * 8 + std::countr_zero(rest) / 8);
        }
      }
    }
  }
};

// Selects the elements that are not zero.
void mark_nonzero(const float* values, std::int64_t n, std::uint8_t* hits);

struct Entry {
  std::uint32_t index;
  float value;
};

// The values to select from: x, plus the residual.
struct Candidates {
  DType dtype = DType::f32;
  const void* x = nullptr;
  std::int64_t n = 0;
  float* residual = nullptr;  // if not null, values are x + residual
  float* velocity = nullptr;  // if not null, momentum * velocity + x replaces x
  float momentum = 0;
  Scaling scaling = {};
  float limit = kInfinity;  // x + residual is limited() to it
};

// Stores all values, which are not limited(), in residual and velocity. There must be a residual.
// The caller then removes the entries that it sends.
void store_values(const Candidates& from);

class TopkSelection {
 public:
  // Returns the largest magnitude(), which also tells if all values are finite.
  std::uint32_t prepare(const Candidates& from, std::int64_t k);

  // Makes the entries(), ordered by index.
  void collect(const Candidates& from);
  void clear() { entries_.clear(); }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void count(const Candidates& from);
  void count_digit(const Candidates& from, int digit);

  std::int64_t k_ = 0;
  bool collected_ = false;   // by prepare()
  std::uint32_t floor_ = 1;  // the smallest magnitude worth collecting
  std::int64_t ties_ = -1;   // how many of magnitude floor_ to take; -1: all, and cut() decides
  std::int64_t collectable_ = 0;
  std::vector<std::int64_t> counts_;
  std::vector<std::uint32_t> magnitudes_;
  std::vector<Entry> entries_;
};

// Cuts a list, ordered by index, to its k largest entries; of equal ones the first are kept. Keeps the
// order and calls dropped(entry) for the others. `magnitudes` is scratch memory.
template <class Dropped>
void keep_largest(std::vector<Entry>& entries, std::int64_t k,
                  std::vector<std::uint32_t>& magnitudes, Dropped dropped) {
  if (static_cast<std::int64_t>(entries.size()) <= k) return;
  std::uint32_t least = 0xffffffffu;
  std::int64_t ties = 0;
  if (k > 0) {
    magnitudes.clear();
    for (const Entry& entry : entries) magnitudes.push_back(magnitude(entry.value));
    const auto kth = magnitudes.begin() + (k - 1);
    std::nth_element(magnitudes.begin(), kth, magnitudes.end(), std::greater<>());
    least = *kth;
    ties = std::count(magnitudes.begin(), kth + 1, least);
  }
  auto kept = entries.begin();
  for (const Entry& entry : entries) {
    const std::uint32_t size = magnitude(entry.value);
    if (size > least || (size == least && ties-- > 0)) {
      *kept++ = entry;
    } else {
      dropped(entry);
    }
  }
  entries.erase(kept, entries.end());
}

}  // namespace pycomm::cpu

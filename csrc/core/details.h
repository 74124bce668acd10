// What ranks must agree on beyond the fields of an Operation: what changes the result, or tells one
// operation from another. The Operation carries a hash of it, which ranks compare. The values
// themselves are for messages.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>

#include "core/hash.h"

namespace pycomm {

struct Details {
  static constexpr int kDims = 4;
  static constexpr std::size_t kLabelBytes = 128;
  static constexpr int kCounts = 8;
  static constexpr std::int32_t kOwnCounts = -1;  // each rank has other blocks

  // With more than kDims dimensions, the last entry is the product of the remaining ones.
  std::int64_t shape[kDims] = {};
  std::uint64_t seed = 0;  // seed and step: only if rounding is stochastic
  std::uint64_t label_hash = 0;
  std::uint64_t counts_hash = 0;
  std::int64_t counts[kCounts] = {};  // the sizes of the first blocks, if they differ
  std::int32_t blocks = 0;            // their number, or kOwnCounts
  std::uint32_t step = 0;
  float momentum = 0;
  float scale = 1;
  std::uint8_t dims = 1;
  std::uint16_t label_bytes = 0;
  std::uint32_t sequence = 0;    // of the operation for which they were published
  char label[kLabelBytes] = {};  // beginning of the caller's tag and code location

  void set_shape(const std::int64_t* sizes, int count) {
    dims = static_cast<std::uint8_t>(count);
    for (int d = 0; d < count; ++d) {
      shape[std::min(d, kDims - 1)] = d < kDims ? sizes[d] : shape[kDims - 1] * sizes[d];
    }
  }
  // The sizes of `n` blocks. Equal ones need not be told, because Operation::count does. Otherwise
  // ranks have blocks of different shapes.
  void set_counts(const std::int64_t* all, int n) {
    if (std::all_of(all, all + n, [&](std::int64_t count) { return count == all[0]; })) return;
    set_own_counts();
    blocks = n;
    std::copy_n(all, std::min(n, kCounts), counts);
    for (int i = 0; i < n; ++i) {
      counts_hash = add_to_hash(counts_hash, static_cast<std::uint64_t>(all[i]));
    }
  }
  // Each rank has other blocks.
  void set_own_counts() {
    blocks = kOwnCounts;
    std::fill_n(shape, kDims, 0);
    dims = 1;
  }
  // Ranks compare the part before a line feed, if there is one. The rest is for messages only.
  void set_label(std::string_view text) {
    const std::string_view compared = text.substr(0, text.find('\n'));
    if (!compared.empty()) label_hash = hash_of(compared);
    label_bytes = static_cast<std::uint16_t>(std::min(text.size(), kLabelBytes));
    std::copy_n(text.begin(), label_bytes, label);
  }
};

constexpr std::uint64_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }

// 0 if every detail has its default value. (The length of a single dimension is Operation::count.)
inline std::uint32_t hash_of(const Details& details) {
  const bool plain = details.dims == 1 && details.label_hash == 0 && details.seed == 0 &&
                     details.step == 0 && bits_of(details.momentum) == 0 &&
                     bits_of(details.scale) == bits_of(1) && details.blocks == 0;
  if (plain) return 0;
  std::uint64_t hash = hash_of({details.seed, details.label_hash, details.step, details.dims,
                                bits_of(details.momentum) << 32 | bits_of(details.scale)});
  for (int d = 0; d < std::min<int>(details.dims, Details::kDims); ++d) {
    hash = add_to_hash(hash, static_cast<std::uint64_t>(details.shape[d]));
  }
  if (details.blocks != 0) {
    hash = add_to_hash(add_to_hash(hash, details.counts_hash),
                       static_cast<std::uint64_t>(details.blocks));
  }
  const auto folded = static_cast<std::uint32_t>(hash >> 32);
  return folded != 0 ? folded : 1;
}

// The details that differ from their defaults, as text.
inline std::string describe(const Details& details) {
  const auto number = [](double x) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", x);
    return std::string(text);
  };
  std::string text;
  if (details.dims != 1) {
    const int shown = std::min<int>(details.dims, Details::kDims);
    text += ", shape=(";
    for (int d = 0; d < shown; ++d) {
      text += (d > 0 ? ", " : "") + std::to_string(details.shape[d]);
    }
    text += details.dims > shown ? "...)" : ")";
  }
  if (details.blocks == Details::kOwnCounts) text += ", uneven";
  if (details.blocks > 0) {
    text += ", counts=(";
    for (int i = 0; i < std::min(details.blocks, Details::kCounts); ++i) {
      text += (i > 0 ? ", " : "") + std::to_string(details.counts[i]);
    }
    text += details.blocks > Details::kCounts ? "...)" : ")";
  }
  if (details.seed != 0) text += ", seed=" + std::to_string(details.seed);
  if (details.step != 0) text += ", step=" + std::to_string(details.step);
  if (bits_of(details.momentum) != 0) text += ", momentum=" + number(details.momentum);
  if (details.scale != 1) text += ", scale=" + number(details.scale);
  if (details.label_bytes != 0) {
    if (details.label[0] != '\n') text += ", ";
    for (std::size_t i = 0; i < std::min<std::size_t>(details.label_bytes, sizeof(details.label));
         ++i) {
      const char c = details.label[i];
      if (c == '\n') {
        text += ", ";
      } else {
        text += c >= ' ' && c <= '~' ? c : '?';  // the label may come from another process
      }
    }
  }
  return text;
}

}  // namespace pycomm

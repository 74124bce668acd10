// Top-k: sends the k elements of largest magnitude, as indices and values.
//
// Elements are ordered by magnitude(), the float's bits without the sign. Among equal elements the
// one with the lower index is selected; zeros are never selected. Elements are grouped into chunks
// of 65,536, whose indices are encoded together.
//
// In an exchange the ranks own chunks cyclically; the chunks of one rank are its region. A rank
// sends each owner at most `kSpread` times the region's fair share of k, and the owner sends a fair
// share of the sums to all ranks. So the cost does not depend on the number of ranks or on where
// their largest elements are. What does not fit stays in the residual of the rank that has it.
//
// An encoded list of chunks, in the machine's (little-endian) byte order:
//
//   | u32 count of each chunk | int8 values: fp32 scale of each chunk | values of all chunks, padded to
//   4 bytes | indices of each chunk (core/codecs/topk_indices.h) |
//
// References: Aji and Heafield 2017 for top-k with feedback; Li and Hoefler 2022 (Ok-Topk) for
// regions; the format: docs/reference/wire-format.md.
#pragma once

#include "core/codecs/int8.h"
#include "core/codecs/topk_indices.h"
#include "core/layout.h"
#include "core/operation.h"

namespace pycomm {

inline constexpr std::int64_t kTopkChunk = std::int64_t{1} << kIndexBits;
// The most words of a chunk's indices: if all elements are selected.
inline constexpr std::int64_t kMostIndexWords = TopkIndices{kTopkChunk, kTopkChunk}.words();
inline constexpr std::int64_t kSpread = 2;
// Indices of selected elements have 32 bits, and products of two of them have 64.
inline constexpr std::int64_t kMostTopkElements = 0xffffffff;

// Selection processes the 31 bits of a magnitude as three digits, the highest digit first.
inline constexpr int kDigits = 3;
PYCOMM_HD constexpr int digit_shift(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }
PYCOMM_HD constexpr int digit_bins(int digit) { return digit == 0 ? 2048 : 1024; }

PYCOMM_HD constexpr std::int64_t topk_chunks(std::int64_t n) { return ceil_div(n, kTopkChunk); }

// One rank's region of n elements among `ranks` ranks. With one rank, all elements.
struct TopkRegion {
  std::int64_t n;
  int ranks;
  int first;  // first chunk of the region, below `ranks`

  PYCOMM_HD constexpr std::int64_t chunks() const {
    const std::int64_t all = topk_chunks(n);
    return all / ranks + (first < all % ranks ? 1 : 0);
  }
  // The place of the region's j-th chunk in the tensor.
  PYCOMM_HD constexpr Range chunk(std::int64_t j) const {
    return Tiles{n, kTopkChunk}[first + j * ranks];
  }
  PYCOMM_HD constexpr std::int64_t elements() const {
    if (chunks() == 0) return 0;
    const std::int64_t last = chunks() - 1;
    return last * kTopkChunk + chunk(last).count;
  }
  // The region's share of k, in proportion to its elements, rounded up.
  PYCOMM_HD constexpr std::int64_t share(std::int64_t k) const {
    if (n == 0) return 0;
    const auto all = static_cast<std::uint64_t>(k) * static_cast<std::uint64_t>(elements());
    const auto whole = static_cast<std::uint64_t>(n);
    return static_cast<std::int64_t>(all / whole + (all % whole != 0 ? 1 : 0));
  }
  // The largest number of elements that a rank sends to the region's owner.
  PYCOMM_HD constexpr std::int64_t capacity(std::int64_t k) const {
    const std::int64_t most = kSpread * share(k);
    return most < elements() ? most : elements();
  }
};

// Byte offsets of the parts of an encoded list.
struct TopkLayout {
  std::int64_t chunks;
  std::int64_t entries;
  DType values;  // u8: int8 with scales

  PYCOMM_HD constexpr bool scaled() const { return values == DType::u8; }
  PYCOMM_HD constexpr std::int64_t scales() const { return chunks * 4; }
  PYCOMM_HD constexpr std::int64_t first_value() const { return chunks * (scaled() ? 8 : 4); }
  PYCOMM_HD constexpr std::int64_t indices() const {
    return first_value() + round_up(entries * size_of(values), 4);
  }
};

// The most bytes of a list of so many entries of so many elements.
PYCOMM_HD constexpr std::int64_t most_list_bytes(std::int64_t elements, std::int64_t entries,
                                                 DType values) {
  const std::int64_t chunks = topk_chunks(elements);
  return TopkLayout{chunks, entries, values}.indices() +
         TopkIndices::most_words(entries, elements, chunks) * 4;
}

// Which rank owns which region of a tensor, and where the lists of one rank are in its area: one
// list for each owner, then the result of the region that it owns.
struct TopkArea {
  std::int64_t n;
  int ranks;
  Codec codec;
  int first_owner;  // of the first chunk; varies, so that small tensors have different owners

  PYCOMM_HD constexpr TopkArea(const Operation& operation, int world)
      : n(operation.count),
        ranks(world),
        codec(operation.codec),
        first_owner(static_cast<int>(first_element(operation) / kTopkChunk % world)) {}

  PYCOMM_HD constexpr TopkRegion region(int owner) const {
    return {n, ranks, (owner + ranks - first_owner) % ranks};
  }
  PYCOMM_HD constexpr int owner(std::int64_t chunk) const {
    return static_cast<int>((chunk + first_owner) % ranks);
  }
  // The most bytes of a list for an owner, or of the owner's result.
  PYCOMM_HD constexpr std::int64_t list_bytes(int owner, bool result) const {
    const TopkRegion owned = region(owner);
    const std::int64_t entries = result ? owned.share(codec.k) : owned.capacity(codec.k);
    return most_list_bytes(owned.elements(), entries, codec.values);
  }
  PYCOMM_HD constexpr std::int64_t room(int owner, bool result) const {
    return round_up(list_bytes(owner, result), kLine);
  }
  PYCOMM_HD constexpr std::int64_t list(int owner) const {
    std::int64_t begin = 0;
    for (int o = 0; o < owner; ++o) begin += room(o, false);
    return begin;
  }
  PYCOMM_HD constexpr std::int64_t result() const { return list(ranks); }
  PYCOMM_HD constexpr std::int64_t bytes(int rank) const { return result() + room(rank, true); }
};

// A value after encoding and decoding.
PYCOMM_HD float through_wire(float value, DType values, const BlockScale& scale) {
  if (values == DType::f32) return value;
  if (values == DType::bf16) return load(store<BFloat16>(value));
  if (values == DType::f16) return load(store<Half>(value));
  return int8_dequantize(int8_quantize(value, scale.inverse), scale.scale);
}

}  // namespace pycomm

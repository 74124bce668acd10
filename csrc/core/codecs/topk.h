// Top-k: the k elements of largest magnitude, as indices and values.
//
// Order of magnitude is that of magnitude(), the float's bits without the sign; of equals the one
// with the lower index is taken, and a zero never. Elements are cut into chunks of 65,536, so that
// an index within a chunk takes 16 bits.
//
// In an exchange the ranks own chunks in turn; what one rank owns is its region. A rank sends at
// most `kSpread` times a region's fair share of k to its owner, and the owner sends a fair share of
// the sums to all: the cost stays the same, however many ranks there are and wherever their largest
// elements lie. What does not fit stays in the residual of the rank that has it.
//
// An encoded list of chunks, in the machine's (little-endian) order:
//
//   | u32 count of each chunk | int8 values: fp32 scale of each chunk | u16 indices, all chunks,
//   padded to 4 bytes | values, all chunks |
//
// References: Aji and Heafield 2017 for top-k with feedback; Li and Hoefler 2022 (Ok-Topk) for
// regions; the format: docs/wire-format.md.
#pragma once

#include "core/codecs/int8.h"
#include "core/layout.h"
#include "core/operation.h"

namespace pycomm {

inline constexpr std::int64_t kTopkChunk = 65536;
inline constexpr std::int64_t kSpread = 2;
// Indices of selected elements are kept in 32 bits, and products of two in 64.
inline constexpr std::int64_t kMostTopkElements = 0xffffffff;

// Selection goes through the 31 bits of a magnitude in three digits, the highest first.
inline constexpr int kDigits = 3;
PYCOMM_HD constexpr int digit_shift(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }
PYCOMM_HD constexpr int digit_bins(int digit) { return digit == 0 ? 2048 : 1024; }

PYCOMM_HD constexpr std::int64_t topk_chunks(std::int64_t n) { return ceil_div(n, kTopkChunk); }

// One rank's region of n elements among `ranks` ranks. `ranks` of 1: everything.
struct TopkRegion {
  std::int64_t n;
  int ranks;
  int first;  // chunk; below `ranks`

  PYCOMM_HD constexpr std::int64_t chunks() const {
    const std::int64_t all = topk_chunks(n);
    return all / ranks + (first < all % ranks ? 1 : 0);
  }
  // The j-th chunk of the region: where in the tensor.
  PYCOMM_HD constexpr Range chunk(std::int64_t j) const {
    return Tiles{n, kTopkChunk}[first + j * ranks];
  }
  PYCOMM_HD constexpr std::int64_t elements() const {
    if (chunks() == 0) return 0;
    const std::int64_t last = chunks() - 1;
    return last * kTopkChunk + chunk(last).count;
  }
  // Its share of k, rounded up.
  PYCOMM_HD constexpr std::int64_t share(std::int64_t k) const {
    if (n == 0) return 0;
    const auto all = static_cast<std::uint64_t>(k) * static_cast<std::uint64_t>(elements());
    const auto whole = static_cast<std::uint64_t>(n);
    return static_cast<std::int64_t>(all / whole + (all % whole != 0 ? 1 : 0));
  }
  // The most elements that a rank sends to the owner.
  PYCOMM_HD constexpr std::int64_t capacity(std::int64_t k) const {
    const std::int64_t most = kSpread * share(k);
    return most < elements() ? most : elements();
  }
};

// Where the parts of an encoded list lie.
struct TopkLayout {
  std::int64_t chunks;
  std::int64_t entries;
  DType values;  // u8: int8 with scales

  PYCOMM_HD constexpr bool scaled() const { return values == DType::u8; }
  PYCOMM_HD constexpr std::int64_t scales() const { return chunks * 4; }
  PYCOMM_HD constexpr std::int64_t indices() const { return chunks * (scaled() ? 8 : 4); }
  PYCOMM_HD constexpr std::int64_t first_value() const {
    return indices() + round_up(entries * 2, 4);
  }
  PYCOMM_HD constexpr std::int64_t bytes() const {
    return first_value() + round_up(entries * size_of(values), 4);
  }
};

// Who owns which region of a tensor, and where the lists of one rank lie in its area: one for every
// owner, then the owned region's result.
struct TopkArea {
  std::int64_t n;
  int ranks;
  Codec codec;
  int first_owner;  // whose the first chunk is, so that many small tensors have different owners

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
  PYCOMM_HD constexpr std::int64_t room(int rank, bool result) const {
    const TopkRegion owned = region(rank);
    const std::int64_t entries = result ? owned.share(codec.k) : owned.capacity(codec.k);
    return round_up(TopkLayout{owned.chunks(), entries, codec.values}.bytes(), kLine);
  }
  PYCOMM_HD constexpr std::int64_t list(int owner) const {
    std::int64_t begin = 0;
    for (int o = 0; o < owner; ++o) begin += room(o, false);
    return begin;
  }
  PYCOMM_HD constexpr std::int64_t result() const { return list(ranks); }
  PYCOMM_HD constexpr std::int64_t bytes(int rank) const { return result() + room(rank, true); }
};

// fp32 to a value on the wire and back.
PYCOMM_HD float through_wire(float value, DType values, const Int8Scale& scale) {
  if (values == DType::f32) return value;
  if (values == DType::bf16) return load(store<BFloat16>(value));
  if (values == DType::f16) return load(store<Half>(value));
  return int8_dequantize(int8_quantize(value, scale.inverse), scale.scale);
}

}  // namespace pycomm

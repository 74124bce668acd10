// The indices of a chunk's selected elements, as an Elias-Fano sequence: close to the entropy, and
// its length depends on the number of entries alone.
//
// The low b bits of an index are stored as they are. Its high bits are stored in unary, as the
// difference to the index before: entry i sets bit (index >> b) + i of a bit vector. With m entries of
// n elements, b is the largest number for which m * 2^b <= n. So an index takes about
// b + 1 + n / (m 2^b) bits: 8.6 at 1 %, where the entropy is 8.1, and 7.0 at 3 %.
//
//   | low bits of entry 0, 1, ... | the bit vector | zeros up to a whole word |
//
// Bits count from the lowest of the first 32-bit word. Writers and readers use private memory, so a
// peer cannot change words between a check and their use, and bits can be set by threads side by side.
//
// References: Elias 1974; Fano 1971; Vigna 2013, "Quasi-succinct indices". Format:
// docs/reference/wire-format.md.
#pragma once

#include "core/layout.h"

namespace pycomm {

// The bits of an index within a chunk, unencoded.
inline constexpr int kIndexBits = 16;

struct TopkIndices {
  std::int64_t entries;   // m, at most `elements`
  std::int64_t elements;  // n

  PYCOMM_HD constexpr int low_bits() const {
    int bits = 0;
    while (bits < kIndexBits && entries << (bits + 1) <= elements) ++bits;
    return bits;
  }
  PYCOMM_HD constexpr std::int64_t words() const {
    if (entries == 0) return 0;
    const int low = low_bits();
    return ceil_div(entries * (low + 1) + ((elements - 1) >> low), 32);
  }

  // The most words of so many entries of so many elements in so many chunks, of which all but the last
  // have 2^16 elements. words() chooses the best b for each chunk, so one b for all takes no less.
  PYCOMM_HD static constexpr std::int64_t most_words(std::int64_t entries, std::int64_t elements,
                                                     std::int64_t chunks) {
    if (entries == 0) return 0;
    const int low = TopkIndices{entries, elements}.low_bits();
    const std::int64_t rounding = 31 * (chunks < entries ? chunks : entries);
    const std::int64_t highs = ((elements - 1) >> low) + 1 - chunks;
    return (entries * (low + 1) + highs + rounding) / 32;
  }
};

// Writes the entries of one chunk into words that are zero.
class TopkIndexWriter {
 public:
  PYCOMM_HD explicit TopkIndexWriter(const TopkIndices& indices)
      : low_(indices.low_bits()), high_(indices.entries * low_) {}

  // Sets the bits of entry i by calls of set(word, bits).
  template <class Set>
  PYCOMM_HD void write(std::int64_t i, std::uint32_t index, Set set) const {
    const std::uint64_t low = index & ((std::uint64_t{1} << low_) - 1);
    const std::uint64_t at = low << (i * low_ % 32);
    set(i * low_ / 32, static_cast<std::uint32_t>(at));
    if (at >> 32 != 0) set(i * low_ / 32 + 1, static_cast<std::uint32_t>(at >> 32));
    const std::int64_t bit = high_ + (index >> low_) + i;
    set(bit / 32, std::uint32_t{1} << bit % 32);
  }

 private:
  int low_;
  std::int64_t high_;  // where the bit vector begins
};

// Reads the entries of one chunk, word by word of the bit vector. Nothing in the words is trusted.
class TopkIndexReader {
 public:
  PYCOMM_HD TopkIndexReader(const TopkIndices& indices, const std::uint32_t* words)
      : indices_(indices),
        words_(words),
        low_(indices.low_bits()),
        high_(indices.entries * low_),
        end_(indices.words()) {}

  // The words with a part of the bit vector.
  PYCOMM_HD std::int64_t begin() const { return high_ / 32; }
  PYCOMM_HD std::int64_t end() const { return end_; }
  // The bit vector's part of a word; each one bit is an entry.
  PYCOMM_HD std::uint32_t ones(std::int64_t word) const {
    return word == begin() ? words_[word] & ~std::uint32_t{0} << high_ % 32 : words_[word];
  }

  // Calls visit(entry, index) for the entries in a word, the first of which is entry `i`. Returns false
  // without visiting the rest at an entry too many, an index out of order or out of bounds.
  template <class Visit>
  PYCOMM_HD bool read(std::int64_t word, std::int64_t i, Visit visit) const {
    std::uint32_t rest = ones(word);
    std::int64_t before = rest % 2 != 0 ? equal_high_before(word, i) : -1;
    for (; rest != 0; rest &= rest - 1, ++i) {
      const std::int64_t high = word * 32 + lowest_one(rest) - high_ - i;
      if (i >= indices_.entries) return false;
      const std::int64_t index = high << low_ | low(i);
      if (index <= before || index >= indices_.elements) return false;
      visit(i, index);
      before = index;
    }
    return true;
  }

 private:
  PYCOMM_HD static int lowest_one(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __ffs(static_cast<int>(bits)) - 1;
#else
    return __builtin_ctz(bits);
#endif
  }
  PYCOMM_HD std::int64_t low(std::int64_t i) const {
    const std::int64_t word = i * low_ / 32, next = word + 1 < end_ ? word + 1 : word;
    const std::uint64_t both = std::uint64_t{words_[next]} << 32 | words_[word];
    return static_cast<std::int64_t>(both >> (i * low_ % 32) & ((std::uint64_t{1} << low_) - 1));
  }
  // The index of the entry before entry i, whose bit is the lowest of `word`, if both have the same high
  // bits; otherwise -1.
  PYCOMM_HD std::int64_t equal_high_before(std::int64_t word, std::int64_t i) const {
    const std::int64_t bit = word * 32;
    if (bit == high_ || i > indices_.entries || ones(word - 1) >> 31 == 0) return -1;
    return (bit - high_ - i) << low_ | low(i - 1);
  }

  TopkIndices indices_;
  const std::uint32_t* words_;
  int low_;
  std::int64_t high_;  // where the bit vector begins
  std::int64_t end_;
};

}  // namespace pycomm

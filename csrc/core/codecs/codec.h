// The description of a codec, that is, of how a tensor's elements become fewer bytes. Ranks must
// agree on it.
#pragma once

#include <string>

#include "core/types.h"

namespace pycomm {

// Limits for the number of elements that share a scale.
inline constexpr std::int64_t kSmallestBlock = 128;
inline constexpr std::int64_t kLargestBlock = 4096;

enum class CodecKind : std::uint8_t { none, cast, int8, topk };
template <>
struct Names<CodecKind> {
  static constexpr const char* all[] = {"none", "cast", "int8", "topk"};
};

struct Codec {
  CodecKind kind = CodecKind::none;
  DType values = DType::f32;    // type of encoded values: cast, top-k (u8 means int8)
  std::uint8_t stochastic = 0;  // int8: rounds stochastically, not to nearest
  std::uint8_t feedback = 0;    // a residual is added
  std::uint32_t block = 0;      // elements that share a scale; 0 without scales
  std::uint32_t k = 0;          // top-k: elements that a rank selects
};
static_assert(sizeof(Codec) == 12);

PYCOMM_HD bool operator==(const Codec& a, const Codec& b) {
  return a.kind == b.kind && a.values == b.values && a.stochastic == b.stochastic &&
         a.feedback == b.feedback && a.block == b.block && a.k == b.k;
}

// True if a scale per block follows the payload. (Top-k's lists have scales of their own.)
PYCOMM_HD constexpr bool is_scaled(const Codec& codec) { return codec.block != 0; }

// The codec's block size, a power of two. Codecs without blocks are processed in units of
// kSmallestBlock.
PYCOMM_HD constexpr std::int64_t block_of(const Codec& codec) {
  return is_scaled(codec) ? codec.block : kSmallestBlock;
}

// log2 of the block size.
PYCOMM_HD constexpr int block_shift(const Codec& codec) {
  int shift = 0;
  while (std::int64_t{1} << shift < block_of(codec)) ++shift;
  return shift;
}

inline std::string describe(const Codec& codec) {
  const char* values = codec.values == DType::u8 ? "int8" : name_of(codec.values);
  std::string text;
  switch (codec.kind) {
    case CodecKind::none:
      return "uncompressed";
    case CodecKind::cast:
      text = std::string("as ") + values;
      break;
    case CodecKind::int8:
      text = "int8 in blocks of " + std::to_string(codec.block) +
             (codec.stochastic != 0 ? ", stochastic" : "");
      break;
    case CodecKind::topk:
      text = "top " + std::to_string(codec.k) + " as " + values;
      break;
  }
  return text + (codec.feedback != 0 ? ", with feedback" : "");
}

}  // namespace pycomm

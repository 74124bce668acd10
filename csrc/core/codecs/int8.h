// Blockwise 8-bit integers: the arithmetic of one block and one element.
//
//   1. A block's largest magnitude A gives its scale, A / 127 in fp32.
//   2. An element x becomes the integer next to x * (127 / A), ties to even; or the one below or
//      above it, at random, so that the expectation is x.
//   3. An integer q stands for q * scale.
//
// |x - decoded| <= scale / 2 (at random: scale) and some ulps. Zeros stay zeros, and scaling by a
// power of two commutes. Two exceptions: where A / 127 is subnormal, the block becomes zero; where
// a value is not finite, the scale is NaN, and so is everything decoded.
//
// 8 + 32 / block bits per element. The format: docs/wire-format.md.
#pragma once

#include "core/reduce.h"

namespace pycomm {

inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// Bits that order floats by magnitude; kInfinityBits and above are not finite.
PYCOMM_HD std::uint32_t magnitude(float value) {
  return bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

struct Int8Scale {
  float scale;
  float inverse;

  PYCOMM_HD bool finite() const { return scale == scale; }
};

// From the largest magnitude() of a block.
PYCOMM_HD Int8Scale int8_scale(std::uint32_t largest) {
  if (largest >= kInfinityBits) return {bit_cast<float>(0x7fc00000u), 0.0f};
  const float scale = bit_cast<float>(largest) / 127.0f;
  if (scale < 0x1p-126f) return {0.0f, 0.0f};
  return {scale, 127.0f / bit_cast<float>(largest)};
}

// To nearest even. Adding 1.5 * 2^23 makes the adder round and leaves the integer in the low bits;
// of a value that is not finite they mean nothing, and its scale says so.
PYCOMM_HD std::int8_t int8_quantize(float value, float inverse) {
  return static_cast<std::int8_t>(bit_cast<std::int32_t>(value * inverse + 0x1.8p23f));
}

// At random: up with a probability equal to the distance from the integer below, from 24 bits.
PYCOMM_HD std::int8_t int8_quantize(float value, float inverse, std::uint32_t random) {
  float scaled = value * inverse;
  scaled = scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled;
  const float near = (scaled + 0x1.8p23f) - 0x1.8p23f;
  const float below = near > scaled ? near - 1.0f : near;
  const float chance = static_cast<float>(random >> 8) * 0x1p-24f;
  const float up = chance < scaled - below ? 1.0f : 0.0f;
  return static_cast<std::int8_t>(bit_cast<std::int32_t>(below + up + 0x1.8p23f));
}

PYCOMM_HD float int8_dequantize(std::int8_t q, float scale) {
  return static_cast<float>(q) * scale;
}

// An encoded stretch of elements is one tile: the payload, then the scales of its blocks.
struct ScaledTile {
  std::int64_t elements;  // room in the payload, a multiple of four
  std::int64_t block;

  PYCOMM_HD constexpr std::int64_t scale_offset(std::int64_t element) const {
    return elements + element / block * 4;
  }
};

// Bytes of n encoded elements that begin at a block, without padding.
PYCOMM_HD constexpr std::int64_t int8_bytes(std::int64_t n, std::int64_t block) {
  return n + (n + block - 1) / block * 4;
}

}  // namespace pycomm

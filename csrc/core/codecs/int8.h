// Blockwise 8-bit integers: the arithmetic of one block and of one element.
//
//   1. The largest magnitude A in a block gives its scale, A / 127 in fp32.
//   2. An element x becomes the integer nearest to x * (127 / A), ties to even. With stochastic
//      rounding it becomes the integer below or above, at random, so that the expectation is x.
//   3. An integer q represents q * scale.
//
// |x - decoded| <= scale / 2 (stochastic: scale), plus some ulps. Zeros stay zeros, and scaling by
// a power of two commutes with encoding. There are two exceptions: if A / 127 is subnormal, the
// block becomes zero; if a value is not finite, the scale is NaN, and so is every decoded element.
//
// 8 + 32 / block bits per element. The format: docs/reference/wire-format.md.
#pragma once

#include "core/codecs/scale.h"

namespace pycomm {

// The scale of a block whose largest magnitude() is `largest`.
PYCOMM_HD BlockScale int8_scale(std::uint32_t largest) { return block_scale(largest, 127.0f); }

// Rounds to nearest even. Adding 1.5 * 2^23 makes the floating-point adder round and leaves the
// integer in the low bits. If the value is not finite, these bits mean nothing, which the block's
// scale (NaN) tells.
PYCOMM_HD std::int8_t int8_quantize(float value, float inverse) {
  return static_cast<std::int8_t>(bit_cast<std::int32_t>(value * inverse + 0x1.8p23f));
}

// Rounds stochastically: up with a probability equal to the distance from the integer below, using
// 24 random bits.
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

// The bytes of n encoded elements that begin at a block boundary, without padding.
PYCOMM_HD constexpr std::int64_t int8_bytes(std::int64_t n, std::int64_t block) {
  return n + (n + block - 1) / block * 4;
}

}  // namespace pycomm

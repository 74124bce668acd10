// Blockwise 8-bit floats, e4m3: a sign, four bits of exponent and three of mantissa.
// docs/contributing/extending.md uses it to show how a codec is added.
//
//   1. The largest magnitude A in a block gives its scale, A / 448 in fp32.
//   2. An element x becomes the e4m3 number nearest to x * (448 / A), ties to even.
//   3. An e4m3 number e represents e * scale.
//
// 8 + 32 / block bits per element. Reference: Micikevicius et al. 2022, "FP8 formats for deep
// learning".
#pragma once

#include "core/codecs/scale.h"

namespace pycomm {

struct E4m3Elements {
  using Payload = std::uint8_t;
  static constexpr bool kScaled = true, kStochastic = false;
  static constexpr Payload kLargest = 0x7e;  // 448

  PYCOMM_HD static BlockScale scale(std::uint32_t largest) { return block_scale(largest, 448.0f); }
  PYCOMM_HD static Payload encode(float value, const BlockScale& scale) {
    const float x = value * scale.inverse;
    const std::uint32_t size = magnitude(x), sign = bit_cast<std::uint32_t>(x) >> 31 << 7;
    // Below 2^-6 numbers are multiples of 2^-9. Adding 2^14 leaves which one in the low bits.
    const std::uint32_t small = bit_cast<std::uint32_t>(bit_cast<float>(size) + 0x1p14f) & 0xfu;
    // From there on, a float's exponent and the first three bits of its mantissa, rounded.
    const std::uint32_t large = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    return static_cast<Payload>(sign | (size < 0x3c800000u ? small : large));
  }
  PYCOMM_HD static float decode(Payload payload, float scale) {
    const std::uint32_t size = payload & 0x7fu;
    const float small = static_cast<float>(size) * 0x1p-9f;
    const float x = size < 8 ? small : bit_cast<float>((size << 20) + (120u << 23));
    return (payload & 0x80u ? -x : x) * scale;
  }
};

}  // namespace pycomm

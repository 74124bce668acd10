// The scale that the elements of a block share, for codecs with 8-bit payloads.
#pragma once

#include "core/reduce.h"

namespace pycomm {

inline constexpr std::uint32_t kInfinityBits = 0x7f800000u;

// The bits of |value|; as integers they order floats by magnitude. kInfinityBits and above are not
// finite.
PYCOMM_HD std::uint32_t magnitude(float value) {
  return bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

struct BlockScale {
  float scale;
  float inverse;

  PYCOMM_HD bool finite() const { return scale == scale; }
};

// The scale of a block whose largest magnitude() is that of A: A / most in fp32, so that A is
// encoded as `most`. Two exceptions: if A / most is subnormal, the block becomes zero; if A is not
// finite, the scale is NaN, and so is every decoded element.
PYCOMM_HD BlockScale block_scale(std::uint32_t largest, float most) {
  if (largest >= kInfinityBits) return {bit_cast<float>(0x7fc00000u), 0.0f};
  const float scale = bit_cast<float>(largest) / most;
  if (scale < 0x1p-126f) return {0.0f, 0.0f};
  return {scale, most / bit_cast<float>(largest)};
}

}  // namespace pycomm

// Stochastic rounding: up with a probability equal to the distance from the number below, so that
// the expectation is the value. With rounding to nearest, a number would never change if each step
// changes it by less than half a unit. This concerns weights in bf16 and second moments in less
// than fp32.
//
// Of an element's 32 random bits, the low 16 round a bf16 weight and the high ones round second
// moments.
#pragma once

#include "core/reduce.h"

namespace pycomm {

// fp32 -> bf16. Infinities and NaN do not change.
PYCOMM_HD std::uint16_t float_to_bfloat16(float value, std::uint16_t random) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + random) >> 16;  // infinities have no low bits to carry
  return static_cast<std::uint16_t>(value == value ? rounded : 0x7fc0u);
}

// True if a value between two neighbours is rounded up. Uses the high 23 of the random bits; the
// fractions of the distance that they stand for are exact and never 0 or 1.
PYCOMM_HD bool rounds_up(float value, float below, float above, std::uint32_t random) {
  const float share = bit_cast<float>(random >> 9 | 0x3f800000u) - (1.0f - 0x1p-24f);
  return value - below > (above - below) * share;
}

}  // namespace pycomm

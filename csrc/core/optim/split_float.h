// An fp32 number as a bf16 number, which the model computes with, and a 16-bit remainder.
//
//   split   hi = bits 16 to 31 of (x + half a unit of bf16), lo = bits 0 to 15 of x
//   join    (hi << 16) + lo, with `lo` as a signed number; `hi` alone if that would be NaN
//
// Exact for every x except NaN, which becomes the canonical NaN. `hi` is x rounded to nearest, ties
// away from zero. (Ties to even would need a seventeenth bit.) So the largest values round to
// infinity, and join() still recovers them.
//
// split() never produces a finite `hi` with a `lo` such that the sum is NaN. Such a pair occurs if
// a weight has been set to zero and `lo` is left over from its last value. join() then returns
// `hi`, so a finite `hi` always gives a finite number, within half a unit of `hi`.
#pragma once

#include "core/reduce.h"

namespace pycomm {

struct SplitFloat {
  std::uint16_t hi;  // bf16
  std::uint16_t lo;
};

// Not for a NaN, except the canonical one.
PYCOMM_HD SplitFloat split_canonical(float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  return {high_half(bits + 0x8000u), static_cast<std::uint16_t>(bits)};
}

PYCOMM_HD SplitFloat split(float value) { return split_canonical(store<float>(value)); }

// NaN for some pairs that split() does not give.
PYCOMM_HD float sum_of_halves(std::uint16_t hi, std::uint16_t lo) {
  const std::int32_t below = static_cast<std::int16_t>(lo);  // negative if split() rounded up
  return bit_cast<float>(in_high_half(hi) + static_cast<std::uint32_t>(below));
}

PYCOMM_HD float join(std::uint16_t hi, std::uint16_t lo) {
  const float sum = sum_of_halves(hi, lo);
  return sum == sum ? sum : bit_cast<float>(in_high_half(hi));
}

}  // namespace pycomm

// fp32 -> bf16 at random: up with a probability equal to the distance from the number below, so
// that the expectation is the value. Infinities and NaN stay what they are.
#pragma once

#include "core/reduce.h"

namespace pycomm {

PYCOMM_HD std::uint16_t float_to_bfloat16(float value, std::uint16_t random) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + random) >> 16;  // infinities have no low bits to carry
  return static_cast<std::uint16_t>(value == value ? rounded : 0x7fc0u);
}

}  // namespace pycomm

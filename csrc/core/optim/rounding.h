// Stochastic rounding: up with a probability equal to the distance from the number below, so that
// the expectation is the value. With rounding to nearest, a number would never change if each step
// changes it by less than half a unit. This concerns weights in bf16 and states in less than fp32:
// a first moment that a spike has raised would stop on its way down.
#pragma once

#include "core/codecs/scale.h"
#include "core/reduce.h"

namespace pycomm {

// What a number is to an optimizer.
enum class Role : std::uint8_t { weight, first_moment, second_moment };

// The random bits that round a number of this role, from the 32 bits of its element. Rounding uses
// the high 13 to 23 of them. The high 16 for any two roles are independent, because a step divides
// first moments by the root of second moments: errors that depend on each other would change its
// expectation. (8-bit codes take the halves themselves: core/optim/state8.h.)
PYCOMM_HD std::uint32_t rounding_bits(Role role, std::uint32_t bits) {
  const std::uint32_t mixed = bits ^ bits >> 16;
  return role == Role::weight ? mixed << 16 : role == Role::first_moment ? bits << 16 : mixed;
}

// fp32 -> bf16. Uses the high 16 of the random bits. Infinities and canonical NaNs do not change: they
// have no low bits to carry. Not for other NaNs.
PYCOMM_HD std::uint16_t canonical_to_bfloat16(float value, std::uint32_t random) {
  return high_half(bit_cast<std::uint32_t>(value) + (random >> 16));
}
PYCOMM_HD std::uint16_t float_to_bfloat16(float value, std::uint32_t random) {
  return canonical_to_bfloat16(pycomm::store<float>(value), random);
}

// fp32 -> fp16. Uses the high 13 of the random bits: fp32 has 13 more than fp16. A finite value stays
// finite, because an average that is infinite once stays infinite.
PYCOMM_HD std::uint16_t float_to_half(float value, std::uint32_t random) {
  const std::uint32_t sign = bit_cast<std::uint32_t>(value) >> 16 & 0x8000u,
                      size = magnitude(value);
  const std::uint32_t normal = ((size + (random >> 19)) >> 13) - (112u << 10);
  // Below fp16's normal numbers: units of 2^-24, of which there are less than 1,024.
  const bool subnormal = size < 0x38800000u;
  const float units = bit_cast<float>(subnormal ? size : 0u) * 0x1p24f;
  const float raised =
      units + static_cast<float>(static_cast<std::int32_t>(random >> 19)) * 0x1p-13f;
  // CPUs convert signed integers faster.
  const auto whole = static_cast<std::uint32_t>(static_cast<std::int32_t>(raised));
  std::uint32_t bits = subnormal ? whole : normal;
  bits = bits < 0x7bffu ? bits : 0x7bffu;
  bits = size < kInfinityBits ? bits : 0x7c00u;
  return static_cast<std::uint16_t>(size > kInfinityBits ? 0x7e00u : sign | bits);
}

// True if a value between two neighbours is rounded up, from its distance from the lower one and
// theirs from each other. Uses the high 23 of the random bits; the fractions of the distance that they
// stand for are exact and never 0 or 1.
PYCOMM_HD bool rounds_up(float distance, float unit, std::uint32_t random) {
  const float share = bit_cast<float>(random >> 9 | 0x3f800000u) - (1.0f - 0x1p-24f);
  return distance > unit * share;
}

}  // namespace pycomm

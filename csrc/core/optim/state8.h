// Optimizer states in 8 bits: the arithmetic of one block of 256 elements and of one element.
//
//   first moment    m = A * (q / 127) * |q / 127|      q from -127 to 127
//   second moment   v = A * (q / 255)^4                q from 0 to 255
//
// A is the block's largest magnitude, in fp32. Codes are finer for smaller values, because
// gradients within a block differ by orders of magnitude. With y = sqrt(|m| / A) and z =
// sqrt(sqrt(v / A)),
//
//   |m - decoded|             <= A * (y / 127 + 1 / 64516)
//   |sqrt(v) - its decoded|   <= sqrt(A) * (z / 255 + 1 / 260100), or sqrt(A) / 65025 if z < 1/255
//
// plus some ulps, if rounded to nearest. Steps round stochastically instead (core/optim/rounding.h),
// because moments change by less than half a unit per step; then m is off by at most
// A * (2 y / 127 + 1 / 16129), and sqrt(v) by at most sqrt(A) * (2 z / 255 + 1 / 65025). A second
// moment above zero never becomes zero, because steps are divided by its root. If A is subnormal, the
// block becomes zero. If a value is not finite, A is NaN, and so is every decoded element.
//
// 8 + 32 / 256 bits per element. There is no lookup table: every processor computes the same bits.
#pragma once

#include <cmath>

#include "core/codecs/int8.h"
#include "core/optim/moderate.h"
#include "core/optim/rounding.h"

namespace pycomm {

inline constexpr std::int64_t kStateBlock = 256;

struct State8Scale {
  float largest;  // A, as it is stored
  float inverse;  // 1 / A
};

// The scale of a block whose largest magnitude() is `largest`.
PYCOMM_HD State8Scale state8_scale(std::uint32_t largest) {
  if (largest >= kInfinityBits) return {bit_cast<float>(0x7fc00000u), 0.0f};
  const float value = bit_cast<float>(largest);
  if (value < 0x1p-126f) return {0.0f, 0.0f};
  // If A is very large, its inverse is subnormal, which is accurate enough for 8 bits.
  return {value, 1.0f / value};
}

// Rounds to nearest even, in the floating-point adder.
PYCOMM_HD std::int32_t nearest_integer(float value) {
  return bit_cast<std::int32_t>(value + 0x1.8p23f) - 0x4b400000;
}

PYCOMM_HD std::uint8_t encode_signed(float value, float inverse) {
  const float root = std::sqrt(bit_cast<float>(magnitude(value)) * inverse) * 127.0f;
  const std::int32_t q = nearest_integer(root);
  return static_cast<std::uint8_t>(value < 0.0f ? -q : q);
}

// The codes of smaller shares are 0 before they are rounded.
PYCOMM_HD float at_least_tiny(float share) { return share > kLeastRooted ? share : kLeastRooted; }

// Rounds stochastically, so that the expectation of the decoded value is the value.
PYCOMM_HD std::uint8_t encode_signed(float value, float inverse, std::uint32_t random) {
  const float square = bit_cast<float>(magnitude(value)) * inverse * 16129.0f;  // of q
  const auto root = static_cast<std::int32_t>(moderate_root(at_least_tiny(square)));
  const std::int32_t below = root < 126 ? root : 126;
  const auto q = static_cast<float>(below);
  const std::int32_t code = below + rounds_up(square - q * q, q + q + 1.0f, random);
  return static_cast<std::uint8_t>(value < 0.0f ? -code : code);
}

PYCOMM_HD float decode_signed(std::uint8_t code, float largest) {
  const float q = static_cast<float>(static_cast<std::int8_t>(code)) * (1.0f / 127.0f);
  return q * std::fabs(q) * largest;
}

PYCOMM_HD std::uint8_t encode_unsigned(float value, float inverse) {
  const float root = std::sqrt(std::sqrt(value * inverse)) * 255.0f;
  const std::int32_t q = nearest_integer(root);
  return static_cast<std::uint8_t>(value > 0.0f && q < 1 ? 1 : q);
}

// The fraction of the largest value that q stands for.
PYCOMM_HD float share_of(float q) {
  const float root = q * (1.0f / 255.0f);
  return (root * root) * (root * root);
}

// Rounds stochastically, so that the expectation of the decoded value is the value.
PYCOMM_HD std::uint8_t encode_unsigned(float value, float inverse, std::uint32_t random) {
  const float share = value * inverse;
  const float fourth_root = moderate_root(moderate_root(at_least_tiny(share)));
  const auto root = static_cast<std::int32_t>(fourth_root * 255.0f);
  const std::int32_t below = root < 254 ? root : 254;
  const auto lower = static_cast<float>(below);
  const float nearest = share_of(lower), unit = share_of(lower + 1.0f) - nearest;
  const std::int32_t q = below + rounds_up(share - nearest, unit, random);
  return static_cast<std::uint8_t>(value > 0.0f && q < 1 ? 1 : q);
}

PYCOMM_HD float decode_unsigned(std::uint8_t code, float largest) {
  return share_of(static_cast<float>(code)) * largest;
}

}  // namespace pycomm

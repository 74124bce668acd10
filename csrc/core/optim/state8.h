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
// The expectation of a decoded m is m within a 2^17th of the distance of the neighbouring codes, and
// of a decoded v within two millionths of v. Of an element's random bits, first moments take the low
// half, and second moments the high 23 bits: the high half, and 7 more that hardly matter. Encoders
// take the root of v, which a GPU has from the update. The largest element itself may be rounded to
// the code below: m in one of 2^16 steps.
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
  // First moments: makes |m| the square of q, 4,096 times as small. Second moments: makes sqrt(v) the
  // square of q, 4 times as large. Zero if all codes are zero.
  float factor;
};

// Neither the factor for the least A nor a product with it overflows. A hair less than 127 squared: the
// largest magnitude, with the roundings on its way, is no more.
inline constexpr float kSignedSquare = (16129.0f - 0x1p-8f) * 0x1p-12f;
inline constexpr float kUnsignedSquare = 4.0f * 65025.0f;

// The scale of a block of first or second moments whose largest magnitude() is `largest`.
PYCOMM_HD State8Scale state8_scale(Role role, std::uint32_t largest) {
  if (largest >= kInfinityBits) return {bit_cast<float>(0x7fc00000u), 0.0f};
  const float value = bit_cast<float>(largest);
  if (value < 0x1p-126f) return {0.0f, 0.0f};
  return {value,
          role == Role::second_moment ? kUnsignedSquare / std::sqrt(value) : kSignedSquare / value};
}

// a * b + c, if the product is exact: then it is the same whether it is fused or not.
PYCOMM_HD float exact(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Encoders return words whose low byte is the code.

// Rounds to nearest even, in the floating-point adder.
PYCOMM_HD std::uint32_t nearest_integer(float value) {
  return bit_cast<std::uint32_t>(value + 0x1.8p23f);
}

PYCOMM_HD std::uint32_t encode_signed(float value, float factor) {
  const float root = std::sqrt(std::fabs(value) * factor) * 64.0f;
  return nearest_integer(std::copysign(root, value));
}

// The low half of a word, as a number.
PYCOMM_HD float low_half(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  float number;  // so written, the half is taken when it is converted, not while it is computed
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f32.u16 %0, low;}"
      : "=f"(number)
      : "r"(word));
  return number;
#else
  return static_cast<float>(static_cast<std::int32_t>(word & 0xffffu));
#endif
}

// The largest multiple of 1/64 that is not above a small number, as 64ths.
PYCOMM_HD std::uint32_t floor_in_64ths(float value) {
  constexpr float shift = 0x1.8p17f;
#if defined(__CUDA_ARCH__)
  return bit_cast<std::uint32_t>(__fadd_rd(value, shift));
#else
  const float nearest = value + shift;
  return bit_cast<std::uint32_t>(nearest) - (nearest - shift > value ? 1u : 0u);
#endif
}

// Rounds stochastically, by the low half of `bits`, so that the expectation of the decoded value is
// the value: s, the square of q, is rounded up from n^2 if s > n^2 + (2 n + 1) u, for a fraction u.
// This is so if sqrt(s - u (1 - u)) > n + u: the code is the integer below that root plus 1 - u. Of a
// negative number, u and 1 - u change places. Everything here is a 64th of that; squares a 4,096th.
PYCOMM_HD std::uint32_t encode_signed(float value, float factor, std::uint32_t bits) {
  const float fraction = exact(low_half(bits), 0x1p-22f, 0x1p-23f);
  const float rest = 0x1p-6f - fraction;
  const float square = std::fabs(value) * factor - fraction * rest;
  const float root = moderate_root(square > kLeastRooted ? square : kLeastRooted);
  return floor_in_64ths(std::copysign(root, value) + rest);
}

PYCOMM_HD float decode_signed(std::int32_t code, float largest) {
  const float q = static_cast<float>(code) * (1.0f / 127.0f);
  return q * std::fabs(q) * largest;
}

// `root` is sqrt(v). Not for zero, whose code is zero.
PYCOMM_HD std::uint32_t encode_unsigned(float root, float factor) {
  const std::uint32_t q = nearest_integer(std::sqrt(root * factor) * 0.5f);
  return (q & 0xffu) == 0 ? 1 : q;
}

// A number from 2 to 510, as it is cut to an even number: a word whose low byte is the half of that,
// and the odd number above.
struct CutToEven {
  std::uint32_t half;
  float above;

  PYCOMM_HD explicit CutToEven(float value) {
#if defined(__CUDA_ARCH__)
    const float shifted = __fadd_rz(value, 0x1p24f);  // from there on, floats are even
    half = bit_cast<std::uint32_t>(shifted);
    above = shifted - (0x1p24f - 1.0f);
#else
    const auto q = static_cast<std::int32_t>(value * 0.5f);
    half = static_cast<std::uint32_t>(q);
    above = static_cast<float>(q + q + 1);
#endif
  }
};

// How far the bits of a number lie above those of a limit, or 0; neither is negative. (A comparison
// would become a branch, because what follows from a limit is constant, and loops would not vectorise.)
PYCOMM_HD std::int32_t above(float number, float limit) {
  const std::int32_t more = bit_cast<std::int32_t>(number) - bit_cast<std::int32_t>(limit);
  return more & ~(more >> 31);
}
PYCOMM_HD float at_least(float number, float limit) {
#if defined(__CUDA_ARCH__)
  return fmaxf(number, limit);
#else
  return bit_cast<float>(bit_cast<std::int32_t>(limit) + above(number, limit));
#endif
}
PYCOMM_HD float at_most(float number, float limit) {
#if defined(__CUDA_ARCH__)
  return fminf(number, limit);
#else
  return bit_cast<float>(bit_cast<std::int32_t>(number) - above(number, limit));
#endif
}

// Rounds stochastically, by the high 23 of `bits`, so that the expectation of the decoded value is the
// value. Not for zero, whose code is zero. s, the fourth power of q, is rounded up from n^4 if s > n^4
// + ((n + 1)^4 - n^4) u, for a fraction u. With e = 2 n + 1 and h = e^2 + 1, this is
// 16 s > h (h + 4 + (8 u - 4) e) - 4. `root` is sqrt(v).
PYCOMM_HD std::uint32_t encode_unsigned(float root, float factor, std::uint32_t bits) {
  const float fraction = bit_cast<float>((bits >> 9) + 0x41000000u) - 12.0f;  // 8 u - 4
  const float share = at_least(root * factor, 4.0f);  // the code is at least 1
  const CutToEven cut(at_most(moderate_root(share), 510.0f - 0x1p-15f));
  const float h = exact(cut.above, cut.above, 1.0f), more = exact(cut.above, cut.above, 5.0f);
  const float over = h * (more + fraction * cut.above) - 4.0f - share * share;
  return cut.half + (bit_cast<std::uint32_t>(over) >> 31);
}

// The fraction of A that a code stands for, from q / 255.
PYCOMM_HD float share_of(float root) { return (root * root) * (root * root); }

PYCOMM_HD float decode_unsigned(std::int32_t code, float largest) {
  return share_of(static_cast<float>(code) * (1.0f / 255.0f)) * largest;
}

}  // namespace pycomm

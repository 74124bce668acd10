// Square roots and quotients of moderate numbers, rounded to nearest as those of all numbers are.
//
// A GPU approximates 1 / sqrt(x) or 1 / y, and refines the result (Markstein 1990, "Computation of
// elementary functions on the IBM RISC System/6000 processor"). sqrt() and division are the same
// instructions, behind a test of the range and a call for all other numbers: twice as many. A thread
// that tests its numbers together, or knows their range, can do without.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/codecs/scale.h"
#include "core/reduce.h"

namespace pycomm {

// From there on, no number on the way to a root is subnormal.
inline constexpr float kLeastRooted = 0x1p-101f;
// Quotients of such numbers, and what is left of the dividend, are neither subnormal nor infinite.
inline constexpr float kLeastDividend = 0x1p-75f, kMostDividend = 0x1p60f;
inline constexpr float kLeastDivisor = 0x1p-51f, kMostDivisor = 0x1p31f;

// The root of x, from an approximation of 1 / root. It is sqrt(x) for the approximations of GPUs, on
// which their sqrt() relies, too; for a few numbers it is not if another one is off by a unit.
PYCOMM_HD float refined_root(float x, float inverse) {
  const float root = x * inverse;
  return std::fma(std::fma(-root, root, x), 0.5f * inverse, root);
}

// The quotient of x and y, from an approximation of 1 / y. It is x / y for the approximations of GPUs,
// on which their division relies, too. If another one is off by a unit, it is not for one dividend of
// each of two divisors, whose significands are 0x1.fffffa and 0x1.fffffe.
PYCOMM_HD float refined_quotient(float x, float y, float inverse) {
  inverse = std::fma(inverse, std::fma(-y, inverse, 1.0f), inverse);
  const float quotient = x * inverse;
  return std::fma(inverse, std::fma(-y, quotient, x), quotient);
}

// The square root of a number from kLeastRooted to the largest finite one.
PYCOMM_HD float moderate_root(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return refined_root(x, inverse);
#else
  return std::sqrt(x);
#endif
}

// x / y, for magnitudes of x from kLeastDividend to kMostDividend, and y from kLeastDivisor to
// kMostDivisor.
PYCOMM_HD float moderate_quotient(float x, float y) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(y));
  return refined_quotient(x, y, inverse);
#else
  return x / y;
#endif
}

// The least and the largest magnitude() of some numbers.
struct Magnitudes {
  std::uint32_t least, most;

  template <std::size_t n>
  PYCOMM_HD explicit Magnitudes(const float (&values)[n]) : Magnitudes(values, 0x7fffffffu) {}
  // Of numbers that have no sign, which need not be masked; one with a sign counts as not finite.
  template <std::size_t n>
  PYCOMM_HD static Magnitudes of_squares(const float (&values)[n]) {
    return Magnitudes(values, 0xffffffffu);
  }

  // True if all of them lie in a range. (Without "and then", which would be a branch.)
  PYCOMM_HD bool are_between(float low, float high) const {
    return (least >= bit_cast<std::uint32_t>(low)) & (most <= bit_cast<std::uint32_t>(high));
  }

 private:
  template <std::size_t n>
  PYCOMM_HD Magnitudes(const float (&values)[n], std::uint32_t mask)
      : least(bit_cast<std::uint32_t>(values[0]) & mask), most(least) {
    for (std::size_t i = 1; i < n; ++i) {
      const std::uint32_t size = bit_cast<std::uint32_t>(values[i]) & mask;
      least = size < least ? size : least;
      most = size > most ? size : most;
    }
  }
};

}  // namespace pycomm

// The arithmetic of reductions, one element at a time.
//
// 16-bit and 32-bit floats accumulate in fp32, doubles in fp64, integers in their own type (they
// wrap around, as in torch). AVG divides the finished sum once, in the accumulator's type; integer
// division truncates. MIN and MAX return NaN if either operand is NaN. Stored NaNs are canonical,
// because processors produce different NaN bits. All of this is compiled with `-ffp-contract=off`
// and `--fmad=false`.
#pragma once

#include <type_traits>

#include "core/types.h"

namespace pycomm {

template <class To, class From>
PYCOMM_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// fp16 -> fp32, exact. The multiplication adjusts the exponent's bias and normalises subnormals.
PYCOMM_HD float half_to_float(std::uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float converted;
  asm("cvt.f32.f16 %0, %1;" : "=f"(converted) : "h"(bits));
  return converted;
#else
  const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
  std::uint32_t result = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  result |= magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0u;
  return bit_cast<float>(result | (bits & 0x8000u) << 16);
#endif
}

// fp32 -> fp16, rounded to nearest even; a NaN becomes 0x7e00.
PYCOMM_HD std::uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  std::uint16_t converted;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(converted) : "f"(value));
  return value == value ? converted : std::uint16_t{0x7e00};
#else
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Below 2^-14: adding 0.5 aligns the mantissa so that the adder itself rounds it.
  const std::uint32_t subnormal =
      bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  std::uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= (143u << 23) ? 0x7c00u : result;
  result |= bits >> 16 & 0x8000u;
  return static_cast<std::uint16_t>(magnitude > 0x7f800000u ? 0x7e00u : result);
#endif
}

// Between a word and its high half. So written, a GPU moves the halves of two neighbours, which share a
// register, in one instruction.
PYCOMM_HD std::uint16_t high_half(std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  std::uint16_t high;
  asm("{.reg .b16 low; mov.b32 {low, %0}, %1;}" : "=h"(high) : "r"(word));
  return high;
#else
  return static_cast<std::uint16_t>(word >> 16);
#endif
}
PYCOMM_HD std::uint32_t in_high_half(std::uint16_t bits) {
#if defined(__CUDA_ARCH__)
  std::uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(std::uint16_t{0}), "h"(bits));
  return word;
#else
  return static_cast<std::uint32_t>(bits) << 16;
#endif
}

PYCOMM_HD float bfloat16_to_float(std::uint16_t bits) {
  return bit_cast<float>(in_high_half(bits));
}

// fp32 -> bf16, rounded to nearest even; a NaN becomes 0x7fc0.
PYCOMM_HD std::uint16_t float_to_bfloat16(float value) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return high_half(value == value ? rounded : 0x7fc00000u);
}

template <class T>
struct accumulator {
  using type = T;
};
template <>
struct accumulator<Half> {
  using type = float;
};
template <>
struct accumulator<BFloat16> {
  using type = float;
};
template <class T>
using accumulator_t = typename accumulator<T>::type;

template <class T>
PYCOMM_HD accumulator_t<T> load(T value) {
  if constexpr (std::is_same_v<T, Half>) {
    return half_to_float(value.bits);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return bfloat16_to_float(value.bits);
  } else {
    return value;
  }
}

template <class T>
PYCOMM_HD T store(accumulator_t<T> value) {
  if constexpr (std::is_same_v<T, Half>) {
    return Half{float_to_half(value)};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16{float_to_bfloat16(value)};
  } else if constexpr (std::is_floating_point_v<T>) {
    if constexpr (sizeof(T) == 8) {
      return value == value ? value : bit_cast<double>(std::uint64_t{0x7ff8000000000000u});
    } else {
      return value == value ? value : bit_cast<float>(0x7fc00000u);
    }
  } else {
    return value;
  }
}

// A type whose loops reduce elements of type T. Signed and unsigned bytes have the same sums and
// products, so that one loop is enough for both.
template <class T, ReduceOp op>
using reduced_type_t = std::conditional_t<std::is_same_v<T, std::int8_t> &&
                                              (op == ReduceOp::sum || op == ReduceOp::prod),
                                          std::uint8_t, T>;

// A reduction of elements of type T, as the parameters of the code that does it.
template <class T, ReduceOp op>
struct Reduction {
  using type = reduced_type_t<T, op>;
  static constexpr ReduceOp kOp = op;
};

// Returns visit(Reduction<T, op>{}), or a default value if elements of type T have no such reduction.
template <class T, class Visit>
PYCOMM_HD auto visit_reduction(ReduceOp op, Visit visit)
    -> decltype(visit(Reduction<T, ReduceOp::sum>{})) {
  constexpr bool kBitwise = std::is_same_v<T, std::uint8_t>;
  switch (op) {
    case ReduceOp::sum:
      return visit(Reduction<T, ReduceOp::sum>{});
    case ReduceOp::avg:
      return visit(Reduction<T, ReduceOp::avg>{});
    case ReduceOp::min:
      return visit(Reduction<T, ReduceOp::min>{});
    case ReduceOp::max:
      return visit(Reduction<T, ReduceOp::max>{});
    case ReduceOp::prod:
      return visit(Reduction<T, ReduceOp::prod>{});
    case ReduceOp::band:
      if constexpr (kBitwise) return visit(Reduction<T, ReduceOp::band>{});
      break;
    case ReduceOp::bor:
      if constexpr (kBitwise) return visit(Reduction<T, ReduceOp::bor>{});
      break;
    case ReduceOp::bxor:
      if constexpr (kBitwise) return visit(Reduction<T, ReduceOp::bxor>{});
      break;
  }
  return decltype(visit(Reduction<T, ReduceOp::sum>{}))();
}

// Combines two contributions. AVG adds them; finish() divides.
template <ReduceOp op, class A>
PYCOMM_HD A combine(A a, A b) {
  if constexpr (op == ReduceOp::min) {
    return a < b || a != a ? a : b;
  } else if constexpr (op == ReduceOp::max) {
    return a > b || a != a ? a : b;
  } else if constexpr (op == ReduceOp::band) {
    return a & b;
  } else if constexpr (op == ReduceOp::bor) {
    return a | b;
  } else if constexpr (op == ReduceOp::bxor) {
    return a ^ b;
  } else if constexpr (std::is_floating_point_v<A>) {
    return op == ReduceOp::prod ? a * b : a + b;
  } else {
    // Unsigned, so that overflow wraps instead of being undefined.
    using U = std::conditional_t<sizeof(A) == 8, std::uint64_t, std::uint32_t>;
    const U x = static_cast<U>(a), y = static_cast<U>(b);
    return static_cast<A>(op == ReduceOp::prod ? x * y : x + y);
  }
}

// Applied once, after the last of the contributions of `ranks` ranks.
template <ReduceOp op, class A>
PYCOMM_HD A finish(A a, int ranks) {
  if constexpr (op != ReduceOp::avg) {
    return a;
  } else if constexpr (std::is_floating_point_v<A>) {
    return a / static_cast<A>(ranks);
  } else if constexpr (sizeof(A) < 8) {
    // Exact: the quotient's error is far below 1/ranks. Unlike integer division, it vectorises.
    using Wide = std::conditional_t<sizeof(A) == 1, float, double>;
    return static_cast<A>(static_cast<Wide>(a) / static_cast<Wide>(ranks));
  } else {
    return static_cast<A>(a / ranks);
  }
}

}  // namespace pycomm

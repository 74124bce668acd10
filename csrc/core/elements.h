// The element types of callers' tensors, and the types in which executors carry them.
//
// Executors know few types (DType in core/types.h). Every other element is carried as one or several
// elements of such a type: a complex number as two real ones, the operand of a bitwise reduction as
// bytes. The operation also names the caller's element type, so that ranks with different types do not
// agree although their bytes may.
#pragma once

#include <optional>
#include <string>

#include "core/types.h"

namespace pycomm {

// Named as in torch. bind/dtypes.h maps torch's and DLPack's types to them. `same`: the type that
// carries it.
enum class Element : std::uint8_t {
  same,
  f64,
  f32,
  f16,
  bf16,
  i64,
  i32,
  u8,
  i16,
  i8,
  boolean,
  u16,
  u32,
  u64,
  c32,
  c64,
  c128,
  f8_e4m3fn,
  f8_e5m2,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f8_e8m0fnu
};
template <>
struct Names<Element> {
  static constexpr const char* all[] = {"same",
                                        "float64",
                                        "float32",
                                        "float16",
                                        "bfloat16",
                                        "int64",
                                        "int32",
                                        "uint8",
                                        "int16",
                                        "int8",
                                        "bool",
                                        "uint16",
                                        "uint32",
                                        "uint64",
                                        "complex32",
                                        "complex64",
                                        "complex128",
                                        "float8_e4m3fn",
                                        "float8_e5m2",
                                        "float8_e4m3fnuz",
                                        "float8_e5m2fnuz",
                                        "float8_e8m0fnu"};
};

// How an element is carried: as `units` elements of `dtype`, which are reduced with `op`.
struct Representation {
  DType dtype;
  int units;
  ReduceOp op;
};

// What the arithmetic of an element type is. `other_unsigned`: carried as the signed type of the same
// size, which has the same sums and products, but another order. `moved`: no arithmetic.
enum class Arithmetic : std::uint8_t { floating, integer, boolean, other_unsigned, complex, moved };

struct ElementRow {
  Element element;
  DType dtype;
  int units;
  Arithmetic arithmetic;
};

inline constexpr ElementRow kElementRows[] = {
    {Element::f64, DType::f64, 1, Arithmetic::floating},
    {Element::f32, DType::f32, 1, Arithmetic::floating},
    {Element::f16, DType::f16, 1, Arithmetic::floating},
    {Element::bf16, DType::bf16, 1, Arithmetic::floating},
    {Element::i64, DType::i64, 1, Arithmetic::integer},
    {Element::i32, DType::i32, 1, Arithmetic::integer},
    {Element::u8, DType::u8, 1, Arithmetic::integer},
    {Element::i16, DType::i16, 1, Arithmetic::integer},
    {Element::i8, DType::i8, 1, Arithmetic::integer},
    {Element::boolean, DType::u8, 1, Arithmetic::boolean},
    {Element::u16, DType::i16, 1, Arithmetic::other_unsigned},
    {Element::u32, DType::i32, 1, Arithmetic::other_unsigned},
    {Element::u64, DType::i64, 1, Arithmetic::other_unsigned},
    {Element::c32, DType::f16, 2, Arithmetic::complex},
    {Element::c64, DType::f32, 2, Arithmetic::complex},
    {Element::c128, DType::f64, 2, Arithmetic::complex},
    {Element::f8_e4m3fn, DType::u8, 1, Arithmetic::moved},
    {Element::f8_e5m2, DType::u8, 1, Arithmetic::moved},
    {Element::f8_e4m3fnuz, DType::u8, 1, Arithmetic::moved},
    {Element::f8_e5m2fnuz, DType::u8, 1, Arithmetic::moved},
    {Element::f8_e8m0fnu, DType::u8, 1, Arithmetic::moved},
};
static_assert(std::size(kElementRows) + 1 == kCountOf<Element>, "one row each, none for `same`");

// `element` must not be `same`.
constexpr const ElementRow& row_of(Element element) {
  return kElementRows[static_cast<int>(element) - 1];
}

// The bytes of an element; 0 for `same`.
constexpr std::int64_t size_of(Element element) {
  if (element == Element::same) return 0;
  return row_of(element).units * size_of(row_of(element).dtype);
}

PYCOMM_HD constexpr bool is_bitwise(ReduceOp op) {
  return op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
}

// True if elements of `dtype` can carry the element. Both may come from another process.
constexpr bool can_carry(DType dtype, Element element) {
  if (!is_known(dtype) || !is_known(element)) return false;
  return element == Element::same || dtype == DType::u8 || dtype == row_of(element).dtype;
}

constexpr Representation moved_as(Element element) {
  return {row_of(element).dtype, row_of(element).units, ReduceOp::sum};
}

// Nothing if the element type has no such reduction. For bool, SUM and MAX are OR, PROD and MIN are AND.
constexpr std::optional<Representation> reduced_as(Element element, ReduceOp op) {
  const ElementRow& row = row_of(element);
  const Representation own{row.dtype, row.units, op};
  const Representation bytes{DType::u8, row.units * static_cast<int>(size_of(row.dtype)), op};
  switch (row.arithmetic) {
    case Arithmetic::floating:
      if (is_bitwise(op)) return {};
      return own;
    case Arithmetic::integer:
      return is_bitwise(op) ? bytes : own;
    case Arithmetic::boolean:
      if (op == ReduceOp::avg) return {};
      if (op == ReduceOp::sum) return Representation{row.dtype, row.units, ReduceOp::max};
      if (op == ReduceOp::prod) return Representation{row.dtype, row.units, ReduceOp::min};
      return own;
    case Arithmetic::other_unsigned:
      if (is_bitwise(op)) return bytes;
      if (op != ReduceOp::sum && op != ReduceOp::prod) return {};
      return own;
    case Arithmetic::complex:
      if (op != ReduceOp::sum && op != ReduceOp::avg) return {};
      return own;
    case Arithmetic::moved:
      return {};
  }
  return {};
}

// As reduced_as(), but throws std::invalid_argument, which lists the reductions that there are.
inline Representation check_reduced_as(Element element, ReduceOp op) {
  if (const std::optional<Representation> found = reduced_as(element, op)) return *found;
  std::string allowed;
  for (int i = 0; i < kCountOf<ReduceOp>; ++i) {
    const auto other = static_cast<ReduceOp>(i);
    if (!reduced_as(element, other)) continue;
    allowed += std::string(allowed.empty() ? "" : ", ") + name_of(other);
  }
  PYCOMM_CHECK(!allowed.empty(), std::string("tensor of ") + name_of(element) +
                                     " can be moved but not reduced, got op " + name_of(op));
  PYCOMM_CHECK(
      false, "op must be one of " + allowed + " for " + name_of(element) + ", got " + name_of(op));
}

}  // namespace pycomm

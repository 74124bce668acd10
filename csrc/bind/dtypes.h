// The element types' names in torch and DLPack.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "core/elements.h"

namespace pycomm::bind {

using torch::headeronly::ScalarType;

// DLPack's type codes. Its header cannot be included together with torch's stable ABI.
inline constexpr int kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6;

// Tensors of types without a code in DLPack go through Python: torch's complex tensors may be
// lazily conjugated, and 8-bit floats are never reduced.
inline constexpr int kNoCode = -1;

struct TorchDType {
  Element element;
  ScalarType scalar_type;
  int code;
  int bits;
};

inline constexpr TorchDType kTorchDTypes[] = {
    {Element::f64, ScalarType::Double, kFloat, 64},
    {Element::f32, ScalarType::Float, kFloat, 32},
    {Element::f16, ScalarType::Half, kFloat, 16},
    {Element::bf16, ScalarType::BFloat16, kBFloat, 16},
    {Element::i64, ScalarType::Long, kInt, 64},
    {Element::i32, ScalarType::Int, kInt, 32},
    {Element::u8, ScalarType::Byte, kUInt, 8},
    {Element::i16, ScalarType::Short, kInt, 16},
    {Element::i8, ScalarType::Char, kInt, 8},
    {Element::boolean, ScalarType::Bool, kBool, 8},
    {Element::u16, ScalarType::UInt16, kUInt, 16},
    {Element::u32, ScalarType::UInt32, kUInt, 32},
    {Element::u64, ScalarType::UInt64, kUInt, 64},
    {Element::c32, ScalarType::ComplexHalf, kNoCode, 32},
    {Element::c64, ScalarType::ComplexFloat, kNoCode, 64},
    {Element::c128, ScalarType::ComplexDouble, kNoCode, 128},
    {Element::f8_e4m3fn, ScalarType::Float8_e4m3fn, kNoCode, 8},
    {Element::f8_e5m2, ScalarType::Float8_e5m2, kNoCode, 8},
    {Element::f8_e4m3fnuz, ScalarType::Float8_e4m3fnuz, kNoCode, 8},
    {Element::f8_e5m2fnuz, ScalarType::Float8_e5m2fnuz, kNoCode, 8},
    {Element::f8_e8m0fnu, ScalarType::Float8_e8m0fnu, kNoCode, 8},
};
static_assert(std::size(kTorchDTypes) + 1 == kCountOf<Element>);

constexpr std::optional<Element> element_of(ScalarType type) {
  for (const TorchDType& row : kTorchDTypes) {
    if (row.scalar_type == type) return row.element;
  }
  return {};
}

constexpr std::optional<TorchDType> torch_dtype_of(int code, int bits, int lanes) {
  for (const TorchDType& row : kTorchDTypes) {
    if (row.code == code && row.bits == bits && lanes == 1) return row;
  }
  return {};
}

}  // namespace pycomm::bind

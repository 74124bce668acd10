// The element types' names in torch and DLPack.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "core/types.h"

namespace pycomm::bind {

using torch::headeronly::ScalarType;

// DLPack's type codes. Its header cannot be included together with torch's stable ABI.
inline constexpr int kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4;

struct TorchDType {
  DType dtype;
  ScalarType scalar_type;
  int code;
  int bits;
};

inline constexpr TorchDType kTorchDTypes[] = {
    {DType::f64, ScalarType::Double, kFloat, 64}, {DType::f32, ScalarType::Float, kFloat, 32},
    {DType::f16, ScalarType::Half, kFloat, 16},   {DType::bf16, ScalarType::BFloat16, kBFloat, 16},
    {DType::i64, ScalarType::Long, kInt, 64},     {DType::i32, ScalarType::Int, kInt, 32},
    {DType::u8, ScalarType::Byte, kUInt, 8},
};
static_assert(std::size(kTorchDTypes) == kCountOf<DType>);

constexpr std::optional<DType> dtype_of(ScalarType type) {
  for (const TorchDType& row : kTorchDTypes) {
    if (row.scalar_type == type) return row.dtype;
  }
  return {};
}

constexpr std::optional<DType> dtype_of(int code, int bits, int lanes) {
  for (const TorchDType& row : kTorchDTypes) {
    if (row.code == code && row.bits == bits && lanes == 1) return row.dtype;
  }
  return {};
}

}  // namespace pycomm::bind

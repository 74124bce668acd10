// Casts: elements are sent as a narrower (or the same) float type, rounded to nearest even. The
// encoding is an array of that type. A cast to the tensor's own type changes nothing.
#pragma once

#include "core/algorithms/table.h"
#include "core/operation.h"
#include "core/reduce.h"

namespace pycomm {

// The largest finite magnitude() of a float type.
PYCOMM_HD constexpr std::uint32_t largest_finite(DType dtype) {
  return dtype == DType::f16 ? 0x477fe000u : dtype == DType::bf16 ? 0x7f7f0000u : 0x7f7fffffu;
}

// The largest contribution that cannot make any intermediate value infinite. With feedback this
// matters, because a residual would keep an infinity forever. Three values must stay finite: the
// fp32 sum over all ranks, what is sent (in ring and tree, undivided partial sums), and the result,
// whose type can hold `largest_result`.
PYCOMM_HD float largest_safe(const Operation& operation, int ranks, float largest_result) {
  const Codec& codec = operation.codec;
  const bool integers = is_scaled(codec) || codec.values == DType::u8;
  const bool partial_sums = Algorithms::partial_sums(operation.algorithm);
  const float n = static_cast<float>(ranks), divided = operation.op == ReduceOp::avg ? 1.0f : n;
  const float wire = bit_cast<float>(largest_finite(integers ? DType::f32 : codec.values));
  const float sum_fits = 0x1p126f / n;
  const float wire_fits = wire / (partial_sums ? n : divided),
              result_fits = largest_result / divided;
  const float least = wire_fits < result_fits ? wire_fits : result_fits;
  // Rounding to a mantissa of eight bits on the way may enlarge a value by 1/256.
  const float safe = least * (1.0f - 0x1p-7f);
  return sum_fits < safe ? sum_fits : safe;
}

PYCOMM_HD float largest_safe(const Operation& operation, int ranks) {
  return largest_safe(operation, ranks, bit_cast<float>(largest_finite(operation.dtype)));
}

// The largest sum or mean of contributions of nodes whose result fits into the tensor's type.
inline float largest_result(DType dtype, ReduceOp op, int nodes, int world) {
  const float ranks_per_node = static_cast<float>(world) / static_cast<float>(nodes);
  return bit_cast<float>(largest_finite(dtype)) * (op == ReduceOp::avg ? ranks_per_node : 1.0f);
}

}  // namespace pycomm

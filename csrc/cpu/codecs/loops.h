// The loops that encode, decode and add elements (block_loops.h), chosen for a dtype and a codec.
#pragma once

#include "core/algorithms/coded.h"

namespace pycomm::cpu {

// Returns whether an encoded element, or one of the output, is not finite.
using EncodeLoop = bool (*)(const Pass& pass, std::int64_t block);

// Adds the sources as EncodeLoop does and stores the sum, not encoded, in the output. Adds what
// rounding to the output's type loses to the residual. Returns whether an element of the output is
// not finite.
using SumLoop = bool (*)(const Pass& pass, std::int64_t block);

// output[i] = decoded (or += decoded, for fp32). Returns whether an element of the output is not
// finite.
using DecodeLoop = bool (*)(const Encoded& from, void* output, std::int64_t n, std::int64_t block);

// magnitude() of the largest contribution.
using LargestLoop = std::uint32_t (*)(const void* x, const float* residual, float scale,
                                      std::int64_t n);

struct CodecLoops {
  EncodeLoop encode;
  SumLoop sum;
  DecodeLoop decode;
  DecodeLoop decode_and_add;  // output is fp32
  LargestLoop largest;
  bool scaled;  // a scale per block follows
};

// For fp32, fp16 and bf16 tensors and the codecs in core/codecs/table.h.
CodecLoops codec_loops(DType dtype, const Codec& codec);

// Rounds fp32 to another type and adds what is lost, times `factor`, to `lost_there` unless it is
// null. Returns the largest magnitude() of the results.
using NarrowLoop = std::uint32_t (*)(const float* from, void* to, std::int64_t n, float* lost_there,
                                     float factor);
NarrowLoop narrow_loop(DType dtype);

// Zeros of either sign count. Usually the first elements already tell.
bool all_zero(DType dtype, const void* x, std::int64_t n);

}  // namespace pycomm::cpu

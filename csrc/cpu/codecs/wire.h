// Encoding into, and decoding from, memory that is no slot of a window: with a header, and trusting
// nothing.
#pragma once

#include "core/codecs/wire.h"
#include "core/rng.h"
#include "cpu/codecs/topk_select.h"

namespace pycomm::cpu {

// Encodes n elements as encoded_bytes() bytes, aligned to four; where top-k finds fewer than k that
// are not zero, the rest is zero. `offset` is the index of the first one in the whole, for random.
// Returns whether something was not finite.
bool encode(const Codec& codec, DType dtype, const void* x, std::int64_t n, std::byte* wire,
            const Random& random, std::int64_t offset);

// Decodes n elements, or adds them to an fp32 output. Returns whether something was not finite.
// Throws std::invalid_argument where the bytes are not what `codec` makes of n elements; the output
// may be written then, but nothing beyond it.
bool decode(const Codec& codec, const std::byte* wire, std::int64_t bytes, std::int64_t n,
            DType dtype, void* output, bool add);

// The indices and values of the k largest of n elements, in order of index.
std::vector<Entry> select(DType dtype, const void* x, std::int64_t n, std::int64_t k);

}  // namespace pycomm::cpu

// Encodes into memory outside of windows, with a header, and decodes from it. Decoding trusts no
// byte.
#pragma once

#include "core/codecs/wire.h"
#include "core/rng.h"
#include "cpu/codecs/topk_select.h"

namespace pycomm::cpu {

// Encodes n elements as encoded_bytes() bytes, aligned to four. If top-k finds fewer than k
// elements that are not zero, the rest of the bytes is zero. `places` are those of the elements in the
// whole. Returns whether an element was not finite.
bool encode(const Codec& codec, DType dtype, const void* x, std::int64_t n, std::byte* wire,
            const Random& random, const Places& places);

// Decodes n elements, or adds them to an fp32 output. Returns whether an element was not finite.
// Throws std::invalid_argument if the bytes are not an encoding of n elements by `codec`; some of
// the output may have been written then, but nothing beyond it.
bool decode(const Codec& codec, const std::byte* wire, std::int64_t bytes, std::int64_t n,
            DType dtype, void* output, bool add);

// The indices and values of the k largest of n elements, in order of index.
std::vector<Entry> select(DType dtype, const void* x, std::int64_t n, std::int64_t k);

}  // namespace pycomm::cpu

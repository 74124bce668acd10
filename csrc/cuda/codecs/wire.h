// Encodes into device memory outside of windows, and decodes from it: the bytes of
// cpu/codecs/wire.h. Host code without torch. All work is enqueued on the stream; decode() with a
// check and select() wait for it, because they return what they have read.
#pragma once

#include <cstdint>

#include "core/codecs/wire.h"
#include "core/rng.h"

namespace pycomm::cuda {

struct WireJob {
  int device = 0;
  std::uintptr_t stream = 0;
  Codec codec = {};
  DType dtype = DType::f32;        // of the elements
  std::int64_t n = 0;              // how many
  std::byte* elements = nullptr;   // read by encode(), written by decode()
  std::byte* wire = nullptr;       // aligned to four
  std::byte* workspace = nullptr;  // workspace_bytes()
  Random random = {};              // of encode()
  Places places = {};
};

void encode(const WireJob& job);
// With `checks`, throws std::invalid_argument if the bytes are not an encoding of n elements by
// `codec`; without, they must be one.
void decode(const WireJob& job, std::int64_t bytes, bool add, bool checks);
// The indices and values of the k largest elements, in order of index; returns how many.
std::int64_t select(const WireJob& job, std::int64_t* indices, float* values);

// Bytes of device memory that these functions need: 0 except for top-k.
std::int64_t workspace_bytes(const Codec& codec, std::int64_t n);

// The parts of encode() and decode() that are top-k's.
void encode_topk(const WireJob& job);
void decode_topk(const WireJob& job, std::int64_t bytes, bool add, bool checks);

}  // namespace pycomm::cuda

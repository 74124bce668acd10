// Reads encoded top-k lists, which come from a peer or from storage.
#pragma once

#include "cuda/codecs/topk.cuh"

namespace pycomm::cuda {

// One chunk of a list. Reads never leave the list's memory: a count that would do so counts as zero.
struct ChunkReader {
  const std::byte* const from;
  TopkLayout layout;
  std::int64_t chunk;
  std::int64_t begin;
  std::int64_t count;

  // Called by all threads of the block.
  __device__ ChunkReader(const TopkRegion& region, std::int64_t chunk, DType values,
                         const std::byte* list, std::int64_t room)
      : from(list), layout{region.chunks(), 0, values}, chunk(chunk) {
    const auto* const counts = reinterpret_cast<const std::uint32_t*>(list);
    std::uint64_t both = 0;  // entries of the chunks before this one, and of all chunks
    for (std::int64_t j = threadIdx.x; j < layout.chunks; j += kThreads) {
      const std::uint64_t here = counts[j] < kTopkChunk ? counts[j] : kTopkChunk;
      both += (j < chunk ? here << 32 : 0) + here;
    }
    both = sum_of_all(both);
    begin = static_cast<std::int64_t>(both >> 32);
    layout.entries = static_cast<std::int64_t>(both & 0xffffffffu);
    count = counts[chunk];
    if (layout.bytes() > room || begin + count > layout.entries) count = 0;
  }

  __device__ std::int64_t index(std::int64_t i) const {
    return reinterpret_cast<const std::uint16_t*>(from + layout.indices())[begin + i];
  }

  __device__ float value(std::int64_t i) const {
    const std::byte* const values = from + layout.first_value();
    switch (layout.values) {
      case DType::f16:
        return load(reinterpret_cast<const Half*>(values)[begin + i]);
      case DType::bf16:
        return load(reinterpret_cast<const BFloat16*>(values)[begin + i]);
      case DType::u8:
        return int8_dequantize(reinterpret_cast<const std::int8_t*>(values)[begin + i],
                               reinterpret_cast<const float*>(from + layout.scales())[chunk]);
      default:
        return reinterpret_cast<const float*>(values)[begin + i];
    }
  }
};

}  // namespace pycomm::cuda

// Reads encoded top-k lists, which come from a peer or from storage.
#pragma once

#include "cuda/codecs/topk.cuh"

namespace pycomm::cuda {

// A sum over the chunks before one chunk, and over all chunks.
struct ChunkSum {
  std::uint64_t both = 0;  // in the upper and in the lower half

  __device__ void add(std::int64_t number, bool is_before) {
    const auto value = static_cast<std::uint64_t>(number);
    both += (is_before ? value << 32 : 0) + value;
  }
  // Adds up what the threads of the block have. All threads call it together.
  __device__ void finish() { both = sum_of_all(both); }
  __device__ std::int64_t before() const { return static_cast<std::int64_t>(both >> 32); }
  __device__ std::int64_t all() const { return static_cast<std::int64_t>(both & 0xffffffffu); }
};

// One chunk of a list. Reads never leave the list's memory: if its counts are too large for it, the
// chunk is empty.
class ChunkReader {
 public:
  // All threads of the block call it together. Counts are read once, because a peer may still write.
  __device__ ChunkReader(const TopkRegion& region, std::int64_t chunk, DType values,
                         const std::byte* list, std::int64_t room)
      : from_(list),
        layout_{region.chunks(), 0, values},
        chunk_(chunk),
        indices_{0, region.chunk(chunk).count} {
    __shared__ std::uint32_t count_of_chunk;
    const auto* const counts = reinterpret_cast<const std::uint32_t*>(list);
    ChunkSum entries, words;
    for (std::int64_t j = threadIdx.x; j < layout_.chunks; j += kThreads) {
      const std::int64_t elements = region.chunk(j).count, count = counts[j];
      const TopkIndices here{count < elements ? count : elements, elements};
      if (j == chunk) count_of_chunk = static_cast<std::uint32_t>(here.entries);
      entries.add(here.entries, j < chunk);
      words.add(here.words(), j < chunk);
    }
    entries.finish();
    words.finish();
    layout_.entries = entries.all();
    first_entry_ = entries.before();
    first_word_ = layout_.indices() + words.before() * 4;
    if (layout_.indices() + words.all() * 4 <= room) indices_.entries = count_of_chunk;
  }

  // Calls visit(index in chunk, value) for all entries. Returns false, to some threads, unless the
  // indices are in order, within bounds and as many as the count. All threads call it together, once.
  // It waits for all threads before the first visit; making the next reader waits for them again.
  template <class Visit>
  __device__ bool read(Visit visit) const {
    std::uint32_t* const words = index_words();
    const auto* const source = reinterpret_cast<const std::uint32_t*>(from_ + first_word_);
    for (std::int64_t w = threadIdx.x; w < indices_.words(); w += kThreads) words[w] = source[w];
    __syncthreads();
    const TopkIndexReader reader(indices_, words);
    bool valid = true;
    std::int64_t found = 0;
    for (std::int64_t first = reader.begin(); first < reader.end(); first += kThreads) {
      const std::int64_t word = first + threadIdx.x;
      const bool exists = word < reader.end();
      std::uint64_t total;
      const std::uint64_t before = sum_before(exists ? __popc(reader.ones(word)) : 0, total);
      const auto entry = found + static_cast<std::int64_t>(before);
      valid &= !exists || reader.read(word, entry, [&](std::int64_t i, std::int64_t index) {
        visit(index, value(i));
      });
      found += static_cast<std::int64_t>(total);
    }
    return valid && found == indices_.entries;
  }

 private:
  // The value of the chunk's entry i.
  __device__ float value(std::int64_t i) const {
    const std::byte* const values = from_ + layout_.first_value();
    switch (layout_.values) {
      case DType::f16:
        return load(reinterpret_cast<const Half*>(values)[first_entry_ + i]);
      case DType::bf16:
        return load(reinterpret_cast<const BFloat16*>(values)[first_entry_ + i]);
      case DType::u8:
        return int8_dequantize(reinterpret_cast<const std::int8_t*>(values)[first_entry_ + i],
                               reinterpret_cast<const float*>(from_ + layout_.scales())[chunk_]);
      default:
        return reinterpret_cast<const float*>(values)[first_entry_ + i];
    }
  }

  const std::byte* from_;
  TopkLayout layout_;
  std::int64_t chunk_;
  TopkIndices indices_;
  std::int64_t first_entry_;  // of the chunk, in the list
  std::int64_t first_word_;   // of the chunk's indices; in bytes
};

}  // namespace pycomm::cuda

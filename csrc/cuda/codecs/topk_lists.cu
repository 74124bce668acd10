// Top-k lists: cut to the owner's capacity, and encoded.
#include "cuda/codecs/topk.cuh"

namespace pycomm::cuda {
namespace {

// Calls visit(entry, exists) for the selected entries of a chunk, in order. Called by all threads.
template <class Visit>
__device__ void each_entry(const TopkBlock& block, std::int64_t chunk, Visit visit) {
  const std::int64_t end = block.entries_before_chunk(chunk + 1, block.n());
  for (std::int64_t i = block.entries_before_chunk(chunk, block.n()); i < end; i += kThreads) {
    visit(i + threadIdx.x, i + threadIdx.x < end);
  }
}

__device__ std::int64_t selected_in(const TopkBlock& block, std::int64_t chunk) {
  return block.entries_before_chunk(chunk + 1, block.n()) -
         block.entries_before_chunk(chunk, block.n());
}

// Calls visit(entry, magnitude) for the selected entries of a chunk, by the threads of one warp.
template <class Visit>
__device__ void each_of_warp(const TopkBlock& block, std::int64_t chunk, Visit visit) {
  constexpr int kAhead = 4;  // loads in flight
  const float* const values = block.scratch.values;
  const std::int64_t end = block.entries_before_chunk(chunk + 1, block.n());
  std::int64_t i = block.entries_before_chunk(chunk, block.n()) + threadIdx.x % 32;
  for (; i < end; i += 32 * kAhead) {
    std::uint32_t sizes[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      sizes[a] = i + 32 * a < end ? magnitude(values[i + 32 * a]) : 0;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (sizes[a] != 0) visit(i + 32 * a, sizes[a]);
    }
  }
}

// Calls visit(chunk) for the chunks of a region, each by one warp.
template <class Visit>
__device__ void each_chunk(const TopkRegion& region, Visit visit) {
  for (std::int64_t j = threadIdx.x / 32; j < region.chunks(); j += kThreads / 32) {
    visit(region.first + j * region.ranks);
  }
}

// Writes to scratch.begins how many entries of each chunk satisfy `counts`.
template <class Counts>
__device__ void count_entries(const TopkBlock& block, const TopkRegion& region, Counts counts) {
  each_chunk(region, [&](std::int64_t chunk) {
    std::uint32_t count = 0;
    each_of_warp(block, chunk,
                 [&](std::int64_t i, std::uint32_t size) { count += counts(i, size) ? 1 : 0; });
    count = sum_of_warp(count);
    if (threadIdx.x % 32 == 0) block.scratch.begins[chunk] = count;
  });
  __syncthreads();
}

// The index of the `left`-th entry of exactly this magnitude.
__device__ std::uint32_t find_tie(const TopkBlock& block, const TopkRegion& region,
                                  std::uint32_t least, std::uint32_t left) {
  __shared__ std::int64_t chunk;
  __shared__ std::uint32_t before, last;
  const TopkScratch& scratch = block.scratch;
  count_entries(block, region, [&](std::int64_t, std::uint32_t size) { return size == least; });
  const auto ties_in = [&](std::int64_t j) {
    return std::uint64_t{scratch.begins[region.first + j * region.ranks]};
  };
  scan_all(region.chunks(), ties_in, [&](std::int64_t j, std::uint64_t ties) {
    if (ties >= left || ties + ties_in(j) < left) return;
    chunk = region.first + j * region.ranks;
    before = static_cast<std::uint32_t>(ties);
  });
  __syncthreads();
  std::uint64_t ties = before;
  each_entry(block, chunk, [&](std::int64_t i, bool exists) {
    const bool tie = exists && magnitude(scratch.values[i]) == least;
    std::uint64_t total;
    const std::uint64_t here = ties + sum_before(tie ? 1 : 0, total);
    if (tie && here + 1 == left) last = scratch.indices[i];
    ties += total;
  });
  __syncthreads();
  return last;
}

// The `capacity` largest entries for an owner; of equal ones, those with the lower index.
__device__ Cut find_cut(const TopkBlock& block, const TopkRegion& region, std::int64_t capacity) {
  __shared__ std::uint32_t bins[digit_bins(0)];
  std::uint32_t prefix = 0, left = static_cast<std::uint32_t>(capacity), bin = 0;
  for (int digit = 0; digit < kDigits; ++digit) {
    for (int i = threadIdx.x; i < digit_bins(digit); i += kThreads) bins[i] = 0;
    __syncthreads();
    each_chunk(region, [&](std::int64_t chunk) {
      each_of_warp(block, chunk, [&](std::int64_t, std::uint32_t size) {
        count_digit(bins, digit, prefix, size);
      });
    });
    __syncthreads();
    pick_bin(bins, digit_bins(digit), left, bin);
    prefix = digit == 0 ? bin : prefix * digit_bins(digit) + bin;
    __syncthreads();  // all threads have read the bins
  }
  return {prefix, find_tie(block, region, prefix, left)};
}

// For each owner's list: the entries that are kept, and where its chunks begin.
__global__ void __launch_bounds__(kThreads, 1)
    cut_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const TopkScratch& scratch = block.scratch;
  for (int owner = block.share.first; owner < block.ranks(); owner += block.share.stride) {
    const TopkRegion region = block.region(owner);
    const std::int64_t capacity = region.capacity(block.codec.k);
    std::int64_t found = 0;
    for (std::int64_t j = threadIdx.x; j < region.chunks(); j += kThreads) {
      const std::int64_t chunk = region.first + j * region.ranks;
      const std::int64_t here = selected_in(block, chunk);
      scratch.begins[chunk] = static_cast<std::uint32_t>(here);
      found += here;
    }
    found = static_cast<std::int64_t>(sum_of_all(static_cast<std::uint64_t>(found)));
    Cut cut{0, 0};
    if (found > capacity) {
      cut = find_cut(block, region, capacity);
      count_entries(block, region, [&](std::int64_t i, std::uint32_t size) {
        return cut.keeps(scratch.indices[i], size);
      });
    }
    const auto at = [&](std::int64_t j) -> std::uint32_t& {
      return scratch.begins[region.first + j * region.ranks];
    };
    const std::uint64_t kept = scan_all(
        region.chunks(), [&](std::int64_t j) { return std::uint64_t{at(j)}; },
        [&](std::int64_t j, std::uint64_t before) { at(j) = static_cast<std::uint32_t>(before); });
    if (threadIdx.x != 0) continue;
    scratch.cuts[owner] = cut;
    scratch.entries[owner] = static_cast<std::uint32_t>(kept);
  }
}

// The words of the indices in the chunks of a region before chunk j. All threads call it together.
template <class Count>
__device__ std::int64_t words_before(const TopkRegion& region, std::int64_t j, Count count_of) {
  std::uint64_t words = 0;
  for (std::int64_t i = threadIdx.x; i < j; i += kThreads) {
    const TopkIndices indices{count_of(i), region.chunk(i).count};
    words += static_cast<std::uint64_t>(indices.words());
  }
  return static_cast<std::int64_t>(sum_of_all(words));
}

// One chunk of an encoded list. Indices are encoded in the block's memory and copied in the end. All
// threads call its functions together.
class ChunkWriter {
 public:
  // Chunk j of the region, whose chunks have count_of(j) entries; `first` is the chunk's first entry.
  template <class Count>
  __device__ ChunkWriter(const TopkLayout& layout, std::byte* to, const TopkRegion& region,
                         std::int64_t j, std::int64_t first, Count count_of)
      : layout_(layout),
        to_(to),
        chunk_(j),
        first_(first),
        indices_{count_of(j), region.chunk(j).count},
        first_word_(layout.indices() + words_before(region, j, count_of) * 4),
        encoder_(indices_) {
    // The same threads have copied them in finish(); write() waits for all before it sets bits.
    for (std::int64_t w = threadIdx.x; w < indices_.words(); w += kThreads) index_words()[w] = 0;
  }

  __device__ const BlockScale& scale() const { return scale_; }
  __device__ void write_scale(std::uint32_t largest) {
    scale_ = int8_scale(largest);
    if (threadIdx.x == 0) {
      reinterpret_cast<float*>(to_ + layout_.scales())[chunk_] = scale_.scale;
    }
  }

  // The entries of threads that have one are stored next to each other.
  __device__ void write(bool has, std::uint32_t index, float value) {
    std::uint64_t total;
    const std::int64_t i = written_ + static_cast<std::int64_t>(sum_before(has ? 1 : 0, total));
    written_ += static_cast<std::int64_t>(total);
    if (!has) return;
    encoder_.write(
        i, static_cast<std::uint32_t>(index % kTopkChunk),
        [](std::int64_t word, std::uint32_t bits) { atomicOr(index_words() + word, bits); });
    write_value(first_ + i, value);
  }

  __device__ void finish() const {
    __syncthreads();  // all bits are set
    auto* const words = reinterpret_cast<std::uint32_t*>(to_ + first_word_);
    for (std::int64_t w = threadIdx.x; w < indices_.words(); w += kThreads) {
      words[w] = index_words()[w];
    }
    if (threadIdx.x == 0) {
      reinterpret_cast<std::uint32_t*>(to_)[chunk_] = static_cast<std::uint32_t>(indices_.entries);
    }
  }

 private:
  __device__ void write_value(std::int64_t i, float value) const {
    std::byte* const values = to_ + layout_.first_value();
    switch (layout_.values) {
      case DType::f16:
        reinterpret_cast<Half*>(values)[i] = store<Half>(value);
        break;
      case DType::bf16:
        reinterpret_cast<BFloat16*>(values)[i] = store<BFloat16>(value);
        break;
      case DType::u8:
        reinterpret_cast<std::int8_t*>(values)[i] =
            scale_.finite() ? int8_quantize(value, scale_.inverse) : std::int8_t{0};
        break;
      default:
        reinterpret_cast<float*>(values)[i] = store<float>(value);
    }
  }

  const TopkLayout layout_;
  std::byte* const to_;
  const std::int64_t chunk_;  // in the list, as all that follows
  const std::int64_t first_;
  const TopkIndices indices_;
  const std::int64_t first_word_;  // in bytes
  const TopkIndexWriter encoder_;
  std::int64_t written_ = 0;
  BlockScale scale_{1.0f, 1.0f};
};

// The lists for the owners, and what this rank tells of its tensor.
__global__ void __launch_bounds__(kThreads, 1)
    list_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  if (block.failed()) return;
  if (block.exchanges() && block.share.first == 0 && threadIdx.x == 0) {
    reinterpret_cast<Preflight*>(block.staging())[block.share.part] = block.preflight();
  }
  const TopkScratch& scratch = block.scratch;
  for (std::int64_t c = block.share.first; c < topk_chunks(block.n()); c += block.share.stride) {
    const int owner = block.area.owner(c);
    const TopkRegion region = block.region(owner);
    const TopkLayout layout{region.chunks(), scratch.entries[owner], block.codec.values};
    const Cut cut = scratch.cuts[owner];
    const auto begin_of = [&](std::int64_t j) -> std::int64_t {
      return j < layout.chunks ? scratch.begins[region.first + j * region.ranks] : layout.entries;
    };
    ChunkWriter writer(layout, block.lists() + block.area.list(owner), region, c / block.ranks(),
                       scratch.begins[c],
                       [&](std::int64_t j) { return begin_of(j + 1) - begin_of(j); });
    const auto keeps = [&](std::int64_t i, bool exists) {
      return exists && cut.keeps(scratch.indices[i], magnitude(scratch.values[i]));
    };
    if (layout.scaled()) {
      std::uint32_t largest = 0;
      each_entry(block, c, [&](std::int64_t i, bool exists) {
        if (keeps(i, exists)) largest = max(largest, magnitude(scratch.values[i]));
      });
      largest = largest_of(largest, kThreads);
      if (threadIdx.x == 0) scratch.largest[c] = largest;
      writer.write_scale(largest);
    }
    each_entry(block, c, [&](std::int64_t i, bool exists) {
      const bool has = keeps(i, exists);
      writer.write(has, has ? scratch.indices[i] : 0, has ? scratch.values[i] : 0.0f);
    });
    writer.finish();
  }
}

__device__ float as_stored(float value, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return load(store<Half>(value));
    case DType::bf16:
      return load(store<BFloat16>(value));
    default:
      return value;
  }
}

// The result of this rank's region for all ranks, in the tensor's type; the rest of the sums stays in
// the residual.
__global__ void __launch_bounds__(kThreads, 1)
    result_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  if (block.failed()) return;
  const TopkScratch& scratch = block.scratch;
  const TopkRegion mine = block.region(block.me.rank);
  const std::int64_t n = mine.elements();
  const bool averages = block.me.operation.op == ReduceOp::avg, feeds = block.feeds();
  const float divisor = averages ? static_cast<float>(block.ranks()) : 1.0f;
  const float factor = divisor * scaling_of(block.feedback).inverse;
  const TopkLayout layout{mine.chunks(), block.entries_before_chunk(mine.chunks(), n),
                          block.codec.values};
  std::byte* const list = block.lists() + block.area.result();
  for (std::int64_t j = block.share.first; j < mine.chunks(); j += block.share.stride) {
    const std::int64_t begin = block.entries_before_chunk(j, n);
    const std::int64_t end = block.entries_before_chunk(j + 1, n);
    ChunkWriter writer(layout, list, mine, j, begin, [&](std::int64_t i) {
      return block.entries_before_chunk(i + 1, n) - block.entries_before_chunk(i, n);
    });
    if (layout.scaled()) {
      std::uint32_t largest = 0;
      for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
        largest = max(largest, magnitude(scratch.values[i] / divisor));
      }
      writer.write_scale(largest_of(largest, kThreads));
    }
    for (std::int64_t first = begin; first < end; first += kThreads) {
      const std::int64_t i = first + threadIdx.x;
      const bool has = i < end;
      const float value = has ? scratch.values[i] / divisor : 0.0f;
      writer.write(has, has ? scratch.indices[i] : 0, value);
      if (!has || !feeds) continue;
      const float sent = through_wire(value, layout.values, writer.scale());
      block.feedback.residual[block.element(scratch.indices[i])] +=
          lost(value, as_stored(sent, block.me.operation.dtype), factor);
    }
    writer.finish();
  }
}

}  // namespace

void launch_topk_lists(const TopkLaunch& launch, cudaStream_t stream) {
  const std::int64_t blocks = std::int64_t{launch.local_ranks} * launch.blocks;
  launch_blocks<&cut_kernel>(blocks, launch, stream);
  launch_blocks<&list_kernel>(blocks, launch, stream);
}

void launch_topk_results(const TopkLaunch& launch, cudaStream_t stream) {
  launch_blocks<&result_kernel>(std::int64_t{launch.local_ranks} * launch.blocks, launch, stream);
}

}  // namespace pycomm::cuda

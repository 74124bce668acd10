// Exact selection of the k largest of n values, mostly in one pass over them.
//
//   1. sample: a sample gives a floor: a magnitude that more than k values exceed, but not many more.
//   2. collect: the pass. The values above the floor are candidates. Each tile of 4096 values has a list
//      of its own for them, so that blocks need no common counter. Also counts the candidates, and the
//      values equal to the floor.
//   3. count, for each of the three digits of a magnitude, highest first: a histogram of the candidates.
//      Together they give the smallest magnitude that is taken, and how many of exactly that size.
//   4. tally, scan: count both per tile, form prefix sums over tiles.
//   5. write: each selected entry to its position. Entries are in index order, so of equal ones the first
//      are taken.
//
// Exceptions need more of the tensor, and are as exact. If there are more candidates than slots in a
// tile's list, steps 3 to 5 read the whole tile again. If k is between the number of candidates and that
// of values not below the floor (many are equal), 3 and 4 have nothing to do, and 5 reads the tiles of the
// first equal ones again. If the sample has misled, so that there are fewer than k of these, 3 to 5 read
// all tiles again.
//
// Reads of the tensor, for n values and at most s = 32,768 samples: 1 + s/n; with many equal values at
// most 2 + s/n; in the worst case 6 + s/n.
#include "cuda/codecs/topk.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr std::int64_t kWarpElements = 32 * kOctet;

// How many samples should be above the floor. If neighbours are alike, only octets are independent:
// eight at a time. So four standard deviations of m of them are 4 sqrt(8 m).
__device__ std::uint32_t samples_above(std::int64_t samples, std::int64_t k, std::int64_t n) {
  const float expected =
      static_cast<float>(samples) * static_cast<float>(k) / static_cast<float>(n);
  return static_cast<std::uint32_t>(expected + 4 * std::sqrt(kOctet * expected) + 4 * kOctet);
}

// One block per part.
template <class T>
__global__ void __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, whole_part(launch));
  const Selector<T> from(block);
  __shared__ std::uint32_t bins[digit_bins(0)];
  const std::int64_t samples = TopkScratch::samples_of(from.n);
  std::uint32_t left = samples == 0 ? 0 : samples_above(samples, from.k, from.n);
  bool found = left < samples;
  auto* const kept = reinterpret_cast<Octet<std::uint32_t>*>(block.scratch.samples);
  for (std::int64_t i = threadIdx.x; found && i < samples / kOctet; i += kThreads) {
    float v[kOctet];
    from.load_values(TopkScratch::sampled_octet(i, from.n) * kOctet, v);
#pragma unroll
    for (int e = 0; e < kOctet; ++e) kept[i].element[e] = magnitude(v[e]);
  }
  std::uint32_t prefix = 0, bin = 0;
  for (int digit = 0; found && digit < kDigits; ++digit) {
    const int count = digit_bins(digit);
    for (int i = threadIdx.x; i < count; i += kThreads) bins[i] = 0;
    __syncthreads();
    // The samples that this thread has stored.
    for (std::int64_t i = threadIdx.x; i < samples / kOctet; i += kThreads) {
      const Octet<std::uint32_t> sizes = kept[i];
#pragma unroll
      for (int e = 0; e < kOctet; ++e) count_digit(bins, digit, prefix, sizes.element[e]);
    }
    __syncthreads();
    found = pick_bin(bins, count, left, bin);
    prefix = digit == 0 ? bin : prefix * count + bin;
    __syncthreads();  // all threads have read the bins
  }
  if (threadIdx.x == 0) *block.scratch.floor = found ? prefix : 0;
}

// Calls visit(tile) for this warp's tiles.
template <class T, class Visit>
__device__ void each_tile(const Selector<T>& from, Visit visit) {
  const TopkBlock& block = from.block;
  const auto warp = static_cast<std::int64_t>(threadIdx.x / 32);
  for (std::int64_t tile = block.share.first + warp * block.share.stride; tile < from.tiles();
       tile += std::int64_t{block.share.stride} * kWarps) {
    visit(tile);
  }
}

// Calls visit(values, used, start) for a tile's values: 8 neighbours per thread, from index `start`.
// `used`: an element of them is not zero.
template <class T, class Visit>
__device__ void each_octet(const Selector<T>& from, std::int64_t tile, Visit visit) {
  const std::int64_t first = tile * kBlockElements, lane = threadIdx.x % 32 * kOctet;
  const std::int64_t end = first + Tiles{from.n, kBlockElements}[tile].count;
  float v[kOctet], next[kOctet] = {};
  bool used = from.load_values(first + lane, v);
  for (std::int64_t start = first; start < end; start += kWarpElements) {
    // Loads the next values before the first use of the current ones.
    const bool next_used =
        start + kWarpElements < end && from.load_values(start + kWarpElements + lane, next);
    visit(v, used, start + lane);
    used = next_used;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = next[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    collect_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  const TopkScratch& scratch = block.scratch;
  const std::uint32_t floor = *scratch.floor;
  const bool leads = threadIdx.x % 32 == 0;
  std::uint32_t all_above = 0, all_equal = 0, largest = 0;
  bool used = false;
  each_tile(from, [&](std::int64_t tile) {
    float* const candidates = scratch.candidates + tile * scratch.slots;
    std::uint16_t* const places = scratch.places + tile * scratch.slots;
    std::uint32_t above = 0, equal = 0;
    each_octet(from, tile, [&](const float* v, bool octet_used, std::int64_t start) {
      std::uint32_t mine = 0;
      used |= octet_used;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const std::uint32_t size = magnitude(v[i]);
        largest = max(largest, size);
        mine += size > floor ? 1 : 0;
        equal += size == floor ? 1 : 0;
      }
      if (!__any_sync(0xffffffffu, mine != 0)) return;
      const std::uint32_t through = sum_in_warp(mine);
      std::uint32_t slot = above + through - mine;
      above += __shfl_sync(0xffffffffu, through, 31);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (magnitude(v[i]) <= floor) continue;
        if (slot < scratch.slots) {
          candidates[slot] = v[i];
          places[slot] = static_cast<std::uint16_t>((start + i) % kBlockElements);
        }
        ++slot;
      }
    });
    equal = sum_of_warp(equal);
    all_above += above;
    all_equal += equal;
    if (leads) scratch.listed[tile] = scratch.above[tile] = above;
    // Zeros are not counted: they include the padding, whose count could overflow a sum.
    if (leads) scratch.equal[tile] = floor == 0 ? 0 : equal;
  });
  largest = __reduce_max_sync(0xffffffffu, largest);
  used = __any_sync(0xffffffffu, used);
  if (!leads) return;
  atomicAdd(&from.found.above, all_above);
  atomicAdd(&from.found.equal, all_equal);
  atomicMax(&from.found.largest, largest);
  if (used) atomicOr(&from.found.used, 1u);
}

// Calls visit(values, indices) for a tile's candidates in order, 8 neighbours per thread, with zeros
// beyond the last; or for all values of the tile if `whole`, or if candidates are not listed.
template <class T, class Visit>
__device__ void each_candidate(const Selector<T>& from, std::int64_t tile, bool whole,
                               Visit visit) {
  const TopkScratch& scratch = from.block.scratch;
  const std::int64_t listed = scratch.listed[tile], begin = tile * scratch.slots;
  std::uint32_t at[kOctet];
  if (whole || listed > scratch.slots || from.misled()) {
    each_octet(from, tile, [&](const float* v, bool, std::int64_t start) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) at[i] = static_cast<std::uint32_t>(start + i);
      visit(v, at);
    });
    return;
  }
  for (std::int64_t start = 0; start < listed; start += kWarpElements) {
    const std::int64_t first = start + threadIdx.x % 32 * kOctet;
    const int count = octet_count(listed - first);
    const auto v = load_octet(scratch.candidates + begin + first, count);
    const auto places = load_octet(scratch.places + begin + first, count);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      at[i] = static_cast<std::uint32_t>(tile * kBlockElements + places.element[i]);
    }
    visit(v.element, at);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  __shared__ std::uint32_t bins[digit_bins(0)];
  const int digit = launch.digit, count = digit_bins(digit);
  std::uint32_t prefix = 0, left = 0;
  if (from.k == 0 || from.takes_all()) return;
  if (digit > 0 && !from.threshold(digit, prefix, left)) return;
  for (int i = threadIdx.x; i < count; i += kThreads) bins[i] = 0;
  __syncthreads();
  each_tile(from, [&](std::int64_t tile) {
    each_candidate(from, tile, false, [&](const float* v, const std::uint32_t*) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) count_digit(bins, digit, prefix, magnitude(v[i]));
    });
  });
  __syncthreads();
  std::uint32_t* const to =
      from.histograms + (digit == 0 ? 0 : digit_bins(0)) + (digit == 2 ? digit_bins(1) : 0);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (bins[i] != 0) atomicAdd(&to[i], bins[i]);
  }
}

// How many of a thread's values are larger than `least`, and how many are equal to it, as two counts in
// one word.
__device__ std::uint32_t count_both(const float* v, std::uint32_t least) {
  std::uint32_t both = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const std::uint32_t size = magnitude(v[i]);
    both += size > least ? 1u << 16 : size == least ? 1 : 0;
  }
  return both;
}

// Counts per tile; scan_kernel() turns them into prefix sums. If all candidates are taken, collect has
// counted.
template <class T>
__global__ void __launch_bounds__(kThreads)
    tally_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  std::uint32_t least, ties;
  from.threshold(kDigits, least, ties);
  if (from.takes_all()) return;
  each_tile(from, [&](std::int64_t tile) {
    std::uint32_t both = 0;
    each_candidate(from, tile, false,
                   [&](const float* v, const std::uint32_t*) { both += count_both(v, least); });
    both = sum_of_warp(both);
    if (threadIdx.x % 32 != 0) return;
    block.scratch.above[tile] = both >> 16;
    block.scratch.equal[tile] = both & 0xffffu;
  });
}

// One block per part: prefix sums over the tiles, and the totals at the end.
__global__ void __launch_bounds__(kThreads) scan_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, whole_part(launch));
  const Selector<float> from(block);
  std::uint32_t least, ties;
  from.threshold(kDigits, least, ties);
  std::uint32_t *const above = block.scratch.above, *const equal = block.scratch.equal;
  const std::uint64_t both = scan_all(
      from.tiles(),
      [&](std::int64_t tile) { return std::uint64_t{above[tile]} << 32 | equal[tile]; },
      [&](std::int64_t tile, std::uint64_t before) {
        above[tile] = static_cast<std::uint32_t>(before >> 32);
        equal[tile] = static_cast<std::uint32_t>(before);
      });
  if (threadIdx.x != 0) return;
  above[from.tiles()] = static_cast<std::uint32_t>(both >> 32);
  equal[from.tiles()] = static_cast<std::uint32_t>(both);
  *block.scratch.ties = ties;
}

// Sums that are not selected stay in the residual.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    write_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  const TopkScratch& scratch = block.scratch;
  const bool feeds = launch.sums && block.feeds(), takes_all = from.takes_all();
  std::uint32_t least, ties;
  from.threshold(kDigits, least, ties);
  each_tile(from, [&](std::int64_t tile) {
    const std::int64_t begin = block.entries_before_tile(tile);
    if (!feeds && block.entries_before_tile(tile + 1) == begin) return;
    std::uint32_t above = scratch.above[tile], equal = scratch.equal[tile];
    // Values that are equal to the floor are not candidates.
    const bool takes_equal = takes_all && equal < ties && scratch.equal[tile + 1] > equal;
    each_candidate(from, tile, feeds || takes_equal, [&](const float* v, const std::uint32_t* at) {
      const std::uint32_t both = count_both(v, least), through = sum_in_warp(both);
      const std::uint32_t total = __shfl_sync(0xffffffffu, through, 31);
      std::uint32_t my_above = above + ((through - both) >> 16);
      std::uint32_t my_equal = equal + ((through - both) & 0xffffu);
      above += total >> 16;
      equal += total & 0xffffu;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const std::uint32_t size = magnitude(v[i]);
        if (size > least || (size == least && my_equal < ties)) {
          const std::uint32_t to = my_above + (my_equal < ties ? my_equal : ties);
          scratch.indices[to] = at[i];
          scratch.values[to] = v[i];
        } else if (feeds && size != 0) {
          block.feedback.residual[block.element(at[i])] += v[i] * from.scaling.inverse;
        }
        my_above += size > least ? 1 : 0;
        my_equal += size == least ? 1 : 0;
      }
    });
  });
}

}  // namespace

void launch_topk_selection(TopkLaunch& launch, bool sums, cudaStream_t stream) {
  launch.sums = sums;
  const std::int64_t parts = std::int64_t{launch.local_ranks} * launch.parts;
  const std::int64_t blocks = std::int64_t{launch.local_ranks} * launch.blocks;
  visit_compressible(sums ? DType::f32 : launch.ranks[0].operation.dtype, [&](auto element) {
    using T = decltype(element);
    launch_blocks<&sample_kernel<T>>(parts, launch, stream);
    launch_blocks<&collect_kernel<T>>(blocks, launch, stream);
    for (launch.digit = 0; launch.digit < kDigits; ++launch.digit) {
      launch_blocks<&count_kernel<T>>(blocks, launch, stream);
    }
    launch_blocks<&tally_kernel<T>>(blocks, launch, stream);
    launch_blocks<&scan_kernel>(parts, launch, stream);
    launch_blocks<&write_kernel<T>>(blocks, launch, stream);
  });
}

}  // namespace pycomm::cuda

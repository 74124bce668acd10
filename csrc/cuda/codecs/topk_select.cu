#include "cuda/codecs/topk.cuh"

namespace pycomm::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch);
  const Selector<T> from(block);
  __shared__ std::uint32_t bins[digit_bins(0)];
  const int digit = launch.digit, count = digit_bins(digit);
  std::uint32_t prefix = 0, left = 0, largest = 0;
  bool used = false;
  if (digit > 0 && !from.threshold(digit, prefix, left)) return;
  for (int i = threadIdx.x; i < count; i += kThreads) bins[i] = 0;
  __syncthreads();
  for (std::int64_t tile = block.lane; tile < from.tiles(); tile += block.lanes) {
    float v[kOctet];
    used |= from.load_values(tile * kBlockElements + threadIdx.x * kOctet, v);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const std::uint32_t size = magnitude(v[i]);
      largest = max(largest, size);
      if (size == 0 || (digit > 0 && size >> digit_shift(digit - 1) != prefix)) continue;
      atomicAdd(&bins[size >> digit_shift(digit) & static_cast<std::uint32_t>(count - 1)], 1u);
    }
  }
  __syncthreads();
  std::uint32_t* const to =
      from.histograms + (digit == 0 ? 0 : digit_bins(0)) + (digit == 2 ? digit_bins(1) : 0);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (bins[i] != 0) atomicAdd(&to[i], bins[i]);
  }
  if (digit > 0 || launch.sums || !block.exchanges()) return;
  put_preflight(launch, largest, used);
}

// How many of a thread's elements are larger than `least`, and how many are equal to it, as two counts
// in one word.
__device__ std::uint64_t count_both(const float* v, std::uint32_t least) {
  std::uint64_t both = 0;
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    const std::uint32_t size = magnitude(v[i]);
    both += size > least ? std::uint64_t{1} << 32 : size == least ? 1 : 0;
  }
  return both;
}

// Counts per tile; scan_kernel() turns them into prefix sums.
template <class T>
__global__ void __launch_bounds__(kThreads)
    tally_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch);
  const Selector<T> from(block);
  std::uint32_t least, ties;
  from.threshold(kDigits, least, ties);
  for (std::int64_t tile = block.lane; tile < from.tiles(); tile += block.lanes) {
    float v[kOctet];
    from.load_values(tile * kBlockElements + threadIdx.x * kOctet, v);
    const std::uint64_t both = sum_of_all(count_both(v, least));
    if (threadIdx.x != 0) continue;
    block.scratch.above[tile] = static_cast<std::uint32_t>(both >> 32);
    block.scratch.equal[tile] = static_cast<std::uint32_t>(both);
  }
}

// One block per rank: prefix sums over the tiles, and the totals at the end.
__global__ void __launch_bounds__(kThreads) scan_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch);
  if (block.lane != 0) return;
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
__global__ void __launch_bounds__(kThreads)
    write_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch);
  const Selector<T> from(block);
  const TopkScratch& scratch = block.scratch;
  const bool feeds = launch.sums && block.feeds();
  std::uint32_t least, ties;
  from.threshold(kDigits, least, ties);
  for (std::int64_t tile = block.lane; tile < from.tiles(); tile += block.lanes) {
    const std::int64_t start = tile * kBlockElements + threadIdx.x * kOctet;
    float v[kOctet];
    from.load_values(start, v);
    std::uint64_t total;
    const std::uint64_t before = sum_before(count_both(v, least), total);
    std::uint32_t above = scratch.above[tile] + static_cast<std::uint32_t>(before >> 32);
    std::uint32_t equal = scratch.equal[tile] + static_cast<std::uint32_t>(before);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const std::uint32_t size = magnitude(v[i]);
      if (size > least || (size == least && equal < ties)) {
        const std::uint32_t at = above + (equal < ties ? equal : ties);
        scratch.indices[at] = static_cast<std::uint32_t>(start + i);
        scratch.values[at] = v[i];
      } else if (feeds && size != 0) {
        block.feedback.residual[block.element(start + i)] += v[i] * from.scaling.inverse;
      }
      above += size > least ? 1 : 0;
      equal += size == least ? 1 : 0;
    }
  }
}

}  // namespace

void launch_topk_selection(TopkLaunch& launch, bool sums, cudaStream_t stream) {
  launch.sums = sums;
  const std::int64_t blocks = launch.local_ranks * launch.layout.lanes;
  visit_compressible(sums ? DType::f32 : launch.ranks[0].operation.dtype, [&](auto element) {
    using T = decltype(element);
    for (launch.digit = 0; launch.digit < kDigits; ++launch.digit) {
      launch_blocks<&count_kernel<T>>(blocks, launch, stream);
    }
    launch_blocks<&tally_kernel<T>>(blocks, launch, stream);
    launch_blocks<&scan_kernel>(blocks, launch, stream);
    launch_blocks<&write_kernel<T>>(blocks, launch, stream);
  });
}

}  // namespace pycomm::cuda

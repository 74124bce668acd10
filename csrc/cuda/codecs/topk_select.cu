// Exact selection of the k largest of n values, mostly in one pass over them.
//
//   1. count the sample, for each of the three digits of a magnitude, highest first: histograms give a
//      floor, a magnitude that more than k values exceed, but not many more.
//   2. collect: the pass. The values above the floor are candidates. Each warp takes neighbouring
//      values, a section, and lists its candidates in order, so that warps need no common counter. Also
//      counts the candidates, and the values equal to the floor.
//   3. count the candidates, likewise: this gives the smallest magnitude that is taken, and how many of
//      exactly that size.
//   4. tally: count both per section.
//   5. write: each selected entry to its position, after those of the sections before. Entries are in
//      index order, so of equal ones the first are taken.
//
// Exceptions need more of the tensor, and are as exact. If there are more candidates than slots in a
// section's list, steps 3 to 5 read the whole section again. If k is between the number of candidates
// and that of values not below the floor (many are equal), 3 and 4 have nothing to do, and 5 reads the
// sections of the first equal ones again. If the sample has misled, so that there are fewer than k of
// these, 3 to 5 read all sections again.
//
// Reads of the tensor, for n values and s <= n / 32 samples: 1, and 3 s/n of which most find the sample
// in a cache; one more with many equal values; five more in the worst case.
#include "cuda/codecs/topk.cuh"

namespace pycomm::cuda {
namespace {

constexpr int kWarps = kThreads / 32;

__device__ bool leads() { return threadIdx.x % 32 == 0; }

// Neighbouring values, which a warp takes. Those of a block's warps are neighbours, too.
struct Section {
  std::uint32_t of_block;  // the number of the block's first
  std::uint32_t begin = 0, size = 0;
  Tally* tally = nullptr;  // null if this warp has none
  Candidate* list = nullptr;
  std::uint32_t slots = 0;
  bool is_last = false;

  // Divides no numbers of 64 bits, because that takes a call, around which registers spill.
  template <class T>
  __device__ explicit Section(const Selector<T>& from) {
    const TopkBlock& of = from.block;
    const auto block = static_cast<std::uint32_t>(of.share.first),
               blocks = static_cast<std::uint32_t>(of.share.stride);
    const auto stretches = static_cast<std::uint32_t>(ceil_div(from.n, kStretch)),
               most = static_cast<std::uint32_t>(TopkScratch::most_sections(from.n));
    const std::uint32_t all = most < blocks * kWarps ? most : blocks * kWarps;
    of_block = block * all / blocks;
    const std::uint32_t number = of_block + threadIdx.x / 32;
    if (number >= (block + 1) * all / blocks) return;
    const std::uint32_t each = stretches / all, more = stretches % all;
    const std::uint32_t first = number * each + (number < more ? number : more);
    const std::uint32_t count = each + (number < more ? 1 : 0);
    begin = first * static_cast<std::uint32_t>(kStretch);
    const std::int64_t most_left = count * kStretch, left = from.n - begin;
    size = static_cast<std::uint32_t>(most_left < left ? most_left : left);
    tally = of.scratch.tallies + number;
    list = of.scratch.candidates + first * of.scratch.slots;
    slots = count * static_cast<std::uint32_t>(of.scratch.slots);
    is_last = number == all - 1;
  }
};

// How many samples should be above the floor; zero if it cannot be told. If neighbours are alike, only
// octets are independent: eight at a time. So four standard deviations of m of them are 4 sqrt(8 m).
__device__ std::uint32_t samples_above(std::int64_t samples, std::int64_t k, std::int64_t n) {
  const float expected =
      static_cast<float>(samples) * static_cast<float>(k) / static_cast<float>(n);
  const auto above =
      static_cast<std::uint32_t>(expected + 4 * std::sqrt(kOctet * expected) + 4 * kOctet);
  return above < samples ? above : 0;
}

// Decides a digit of the floor, or of the smallest magnitude that is taken. All threads of the block call
// it together.
template <class T>
__device__ DigitSearch::Step decide(const Selector<T>& from, int digits) {
  const bool samples = from.block.launch.samples;
  const std::int64_t all = TopkScratch::samples_of(from.n);
  if (samples ? all == 0 : from.takes_all()) return {};
  std::uint32_t wanted = 0;
  if (digits < 2) wanted = samples ? samples_above(all, from.k, from.n) : from.k;
  return from.search.decide(digits, wanted, from.block.share.first == 0 && threadIdx.x == 0);
}

// The smallest magnitude that is taken, and how many of exactly that size, after the search has found
// `step`. Zeros are never taken.
template <class T>
__device__ DigitSearch::Step smallest(const Selector<T>& from, const DigitSearch::Step& step) {
  if (from.k == 0) return {0xffffffffu, 0};
  const std::uint32_t floor = from.found.floor;
  if (from.takes_all()) return {floor, floor == 0 ? 0 : from.k - from.found.above};
  return step.left == 0 ? DigitSearch::Step{} : step;
}

template <class T, class Visit>
__device__ void each_sample(const Selector<T>& from, Visit visit) {
  const std::int64_t octets = TopkScratch::samples_of(from.n) / kOctet;
  const Share& share = from.block.share;
  for (std::int64_t i = std::int64_t{share.first} * kThreads + threadIdx.x; i < octets;
       i += std::int64_t{share.stride} * kThreads) {
    float v[kOctet];
    from.load_values(TopkScratch::sampled_octet(i, from.n) * kOctet, v);
#pragma unroll
    for (int e = 0; e < kOctet; ++e) visit(v[e]);
  }
}

// Calls visit(value, index) for a section's candidates in order, one per lane, with zeros beyond the
// last; or for all its values if `whole`, or if candidates are not listed.
template <class T, class Visit>
__device__ void each_candidate(const Selector<T>& from, const Section& section, bool whole,
                               Visit visit) {
  constexpr int kAhead = 8;  // loads in flight
  if (section.tally == nullptr) return;
  const std::int64_t listed = section.tally->listed;
  whole = whole || listed > section.slots || from.misled();
  const std::int64_t n = whole ? section.size : listed;
  for (std::int64_t start = 0; start < n; start += 32 * kAhead) {
    Candidate some[kAhead] = {};
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t i = start + 32 * a + threadIdx.x % 32;
      if (i >= n) continue;
      const std::uint32_t at = section.begin + static_cast<std::uint32_t>(i);
      some[a] = whole ? Candidate{from.value(at), at} : section.list[i];
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) visit(some[a].value, some[a].index);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  __shared__ std::uint32_t bins[digit_bins(0)];
  const int digit = launch.digit, count = digit_bins(digit);
  const DigitSearch::Step step = decide(from, digit);
  if (step.left == 0) return;
  for (int i = threadIdx.x; i < count; i += kThreads) bins[i] = 0;
  __syncthreads();
  const auto visit = [&](float value, std::uint32_t = 0) {
    count_digit(bins, digit, step.prefix, magnitude(value));
  };
  if (launch.samples) {
    each_sample(from, visit);
  } else {
    each_candidate(from, Section(from), false, visit);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (bins[i] != 0) atomicAdd(from.search.of(digit) + i, bins[i]);
  }
}

// Calls visit(values, start) for this lane's octets of a section. Returns true if an element of x is not
// zero, as far as the values do not tell.
template <class T, class Visit>
__device__ bool each_octet(const Selector<T>& from, const Section& section, Visit visit) {
  constexpr int kApart = 32 * kOctet;
  auto left = static_cast<int>(section.size);
  std::uint32_t start = section.begin + threadIdx.x % 32 * kOctet;
  if (!from.feeds() && takes_octets(from.x + start)) {
    for (; left >= kStretch; left -= kStretch) {
      Octet<T> octets[kOctets];  // all loads are in flight at once
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        octets[o] = reinterpret_cast<const Octet<T>*>(from.x + start)[o * 32];
      }
#pragma unroll
      for (int o = 0; o < kOctets; ++o, start += kApart) {
        float v[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) v[i] = load(octets[o].element[i]);
        visit(v, start);
      }
    }
  }
  bool used = false;
#pragma unroll 1
  for (; left > 0; left -= kApart, start += kApart) {
    float v[kOctet];
    used |= from.load_values(start, v);
    visit(v, start);
  }
  return used;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    collect_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  const DigitSearch::Step step = decide(from, kDigits);
  const std::uint32_t floor = step.left == 0 ? 0 : step.prefix, least = floor == 0 ? 1 : floor;
  const Section section(from);
  std::uint32_t above = 0, equal = 0;
  float most = 0;
  bool used = each_octet(from, section, [&](const float* v, std::uint32_t first) {
    float largest = v[0];
#pragma unroll
    for (int i = 1; i < kOctet; ++i) largest = larger(largest, v[i]);
    most = larger(most, largest);
    if (!__any_sync(0xffffffffu, magnitude(largest) >= least)) return;
    std::uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      mine += magnitude(v[i]) > floor ? 1 : 0;
      equal += magnitude(v[i]) == floor ? 1 : 0;
    }
    const std::uint32_t through = sum_in_warp(mine);
    std::uint32_t slot = above + through - mine;
    above += __shfl_sync(0xffffffffu, through, 31);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (magnitude(v[i]) <= floor) continue;
      if (slot < section.slots) section.list[slot] = {v[i], first + i};
      ++slot;
    }
  });
  // Zeros are not counted: they include the padding.
  equal = floor == 0 ? 0 : sum_of_warp(equal);
  if (section.tally != nullptr && leads()) *section.tally = {above, above, equal};
  const std::uint64_t both = sum_of_all(leads() ? std::uint64_t{above} << 32 | equal : 0);
  const std::uint32_t largest = largest_of(magnitude(most), kThreads);
  used = __syncthreads_or(from.feeds() ? used : largest != 0) != 0;
  if (threadIdx.x != 0) return;
  atomicAdd(&from.found.above, static_cast<std::uint32_t>(both >> 32));
  atomicAdd(&from.found.equal, static_cast<std::uint32_t>(both));
  atomicMax(&from.found.largest, largest);
  if (used) atomicOr(&from.found.used, 1u);
  if (block.share.first == 0) from.found.floor = floor;
}

// How many of a section's entries are larger than the smallest, and equal to it. If all candidates are
// taken, collect has counted.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    tally_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  const auto [least, ties] = smallest(from, decide(from, kDigits));
  const Section section(from);
  if (from.takes_all() || section.tally == nullptr) return;
  std::uint32_t above = 0, equal = 0;
  each_candidate(from, section, false, [&](float value, std::uint32_t) {
    const std::uint32_t size = magnitude(value);
    above += size > least ? 1 : 0;
    equal += size == least && ties != 0 ? 1 : 0;
  });
  above = sum_of_warp(above);
  equal = sum_of_warp(equal);
  if (!leads()) return;
  section.tally->above = above;
  section.tally->equal = equal;
}

// What the sections before a warp's have: above in the upper half, equal in the lower one. All threads of
// the block call it together.
__device__ std::uint64_t before_section(const TopkScratch& scratch, const Section& section) {
  const auto of = [](const Tally& tally) { return std::uint64_t{tally.above} << 32 | tally.equal; };
  std::uint64_t sum = 0, total;
  for (std::uint32_t s = threadIdx.x; s < section.of_block; s += kThreads) {
    sum += of(scratch.tallies[s]);
  }
  const std::uint64_t before_block = sum_of_all(sum);
  const bool counts = section.tally != nullptr && leads();
  const std::uint64_t before = sum_before(counts ? of(*section.tally) : 0, total);
  return before_block + __shfl_sync(0xffffffffu, before, 0);
}

// The number of the first `n` entries, which are in order, whose index is below `end`.
__device__ std::int64_t entries_below(const std::uint32_t* indices, std::int64_t n,
                                      std::int64_t end) {
  std::int64_t low = 0;
  while (low < n) {
    const std::int64_t middle = (low + n) / 2;
    if (indices[middle] < end) {
      low = middle + 1;
    } else {
      n = middle;
    }
  }
  return low;
}

// Sums that are not selected stay in the residual.
template <class T>
__global__ void __launch_bounds__(kThreads)
    write_kernel(const __grid_constant__ TopkLaunch launch) {
  const TopkBlock block(launch, share_of_block(launch));
  const Selector<T> from(block);
  const Section section(from);
  const TopkScratch& scratch = block.scratch;
  const bool feeds = launch.sums && block.feeds();
  const auto [least, ties] = smallest(from, from.search.steps[kDigits - 1]);
  const std::uint64_t before = before_section(scratch, section);
  if (section.tally == nullptr) return;
  auto above = static_cast<std::uint32_t>(before >> 32), equal = static_cast<std::uint32_t>(before);
  const auto position = [ties](std::uint32_t larger, std::uint32_t as_large) {
    return std::int64_t{larger} + (as_large < ties ? as_large : ties);
  };
  const std::int64_t first = position(above, equal);
  // Values that are equal to the floor are not candidates.
  const bool takes_equal = from.takes_all() && equal < ties && section.tally->equal != 0;
  const std::uint32_t lanes_before = (1u << threadIdx.x % 32) - 1;
  each_candidate(from, section, feeds || takes_equal, [&](float value, std::uint32_t index) {
    const std::uint32_t size = magnitude(value);
    const bool is_equal = size == least && ties != 0;
    const std::uint32_t larger = __ballot_sync(0xffffffffu, size > least);
    const std::uint32_t as_large = __ballot_sync(0xffffffffu, is_equal);
    const std::uint32_t my_equal = equal + __popc(as_large & lanes_before);
    if (size > least || (is_equal && my_equal < ties)) {
      const std::int64_t to = position(above + __popc(larger & lanes_before), my_equal);
      scratch.indices[to] = index;
      scratch.values[to] = value;
    } else if (feeds && size != 0) {
      block.feedback.residual[block.element(index)] += value * from.scaling.inverse;
    }
    above += __popc(larger);
    equal += __popc(as_large);
  });
  __syncwarp();  // all lanes have written their entries
  const std::int64_t mine = position(above, equal) - first;
  const auto fill = [&](std::int64_t tile) {
    scratch.before[tile] = static_cast<std::uint32_t>(
        first + entries_below(scratch.indices + first, mine, tile * kBlockElements));
  };
  const std::int64_t begin = section.begin, end = begin + section.size;
  std::int64_t tile = ceil_div(begin, kBlockElements) + threadIdx.x % 32;
  for (; tile * kBlockElements < end; tile += 32) fill(tile);
  if (section.is_last && leads()) fill(from.tiles());
}

}  // namespace

void launch_topk_selection(TopkLaunch& launch, bool sums, cudaStream_t stream) {
  launch.sums = sums;
  const std::int64_t blocks = std::int64_t{launch.local_ranks} * launch.blocks;
  visit_compressible(sums ? DType::f32 : launch.ranks[0].operation.dtype, [&](auto element) {
    using T = decltype(element);
    const auto count = [&](bool samples) {
      launch.samples = samples;
      for (launch.digit = 0; launch.digit < kDigits; ++launch.digit) {
        launch_blocks<&count_kernel<T>>(blocks, launch, stream);
      }
    };
    count(true);
    launch_blocks<&collect_kernel<T>>(blocks, launch, stream);
    count(false);
    launch_blocks<&tally_kernel<T>>(blocks, launch, stream);
    launch_blocks<&write_kernel<T>>(blocks, launch, stream);
  });
}

}  // namespace pycomm::cuda

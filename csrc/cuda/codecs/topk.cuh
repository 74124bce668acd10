// Top-k on a device: the memory through which its kernels pass results, and the steps they share.
//
//   1. Select (topk_select.cu).
//   2. Cut and encode the lists (topk_lists.cu).
//   3. Exchange (topk_exchange.cu): announce; add up the region's lists in rank order; select among
//      the sums; encode them; announce again; decode every region's result.
//
// A step that needs the results of all blocks is a kernel of its own: blocks of one device never wait
// for each other.
#pragma once

#include "core/codecs/topk.h"
#include "core/codecs/wire.h"
#include "cuda/codecs/coded_launch.cuh"
#include "cuda/codecs/scan.cuh"

namespace pycomm::cuda {

struct TopkLaunch : CodedLaunch {
  int digit;        // the digit that is counted
  bool sums;        // true: select among the sums of this rank's region; false: in the tensor
  std::byte* wire;  // without a window: where the list goes, after its header
};

// The entries of a list that are kept: all above a magnitude, and those equal to it up to an index.
struct Cut {
  std::uint32_t least;
  std::uint32_t last;

  __device__ bool keeps(std::uint32_t index, std::uint32_t size) const {
    return size > least || (size == least && index <= last);
  }
};

// What one pass over all values finds.
struct Found {
  std::uint32_t above;    // values larger than the floor
  std::uint32_t equal;    // values that are equal to it
  std::uint32_t largest;  // the largest magnitude()
  std::uint32_t used;     // not zero: an element of the tensor is not
};

// Device memory of one part: what must be zero at the start, and the rest.
struct TopkScratch {
  static constexpr int kBins = digit_bins(0) + digit_bins(1) + digit_bins(2);
  static constexpr std::int64_t kZeroed = 2 * (kBins * 4 + sizeof(Found));
  static constexpr std::int64_t kMostSamples = 32768;

  std::uint32_t* histograms;  // those of the tensor, then those of the sums
  Found* found;               // in the tensor, then in the sums
  std::uint32_t* floor;       // larger values are candidates
  std::uint32_t* samples;     // magnitudes
  std::uint32_t* ties;        // how many entries of exactly the smallest magnitude are taken
  std::uint32_t* keep;        // not zero: residuals stay unchanged
  std::uint32_t* above;       // per tile: larger entries in the tiles before it
  std::uint32_t*
      equal;  // per tile: entries of exactly the smallest magnitude in the tiles before it
  std::uint32_t* listed;  // per tile: how many candidates it has, even if they have no slots
  float* candidates;      // per tile: slots for their values, and for their places in the tile
  std::uint16_t* places;
  std::int64_t slots;      // of a tile
  Cut* cuts;               // per owner: which entries of its list are kept
  std::uint32_t* entries;  // per owner: how many entries are kept
  std::uint32_t* begins;   // per chunk: its first entry in its owner's list
  std::uint32_t* largest;  // per chunk: the largest magnitude() of its entries
  std::uint32_t* indices;  // of the selected entries
  float* values;
  float* sums;         // of this rank's region; null if there is no other rank
  std::int64_t bytes;  // without what must be zero

  PYCOMM_HD TopkScratch(std::byte* zeroed, std::byte* rest, std::int64_t n, std::int64_t k,
                        int ranks, bool exchange)
      : histograms(reinterpret_cast<std::uint32_t*>(zeroed)),
        found(reinterpret_cast<Found*>(histograms + 2 * kBins)) {
    auto at = reinterpret_cast<std::uintptr_t>(rest);
    const auto take = [&at](std::int64_t words) {
      const std::uintptr_t begin = at;
      at += static_cast<std::uintptr_t>(round_up(words * 4, 256));
      return reinterpret_cast<std::uint32_t*>(begin);
    };
    const std::int64_t tiles = ceil_div(n, kBlockElements) + 1, chunks = topk_chunks(n);
    slots = slots_of(n, k);
    floor = take(1);
    samples = take(samples_of(n));
    ties = take(1);
    keep = take(1);
    above = take(tiles);
    equal = take(tiles);
    listed = take(tiles);
    candidates = reinterpret_cast<float*>(take(tiles * slots));
    places = reinterpret_cast<std::uint16_t*>(take(tiles * slots / 2));
    cuts = reinterpret_cast<Cut*>(take(2 * ranks));
    entries = take(ranks);
    begins = take(chunks);
    largest = take(chunks);
    indices = take(k);
    values = reinterpret_cast<float*>(take(k));
    sums = reinterpret_cast<float*>(take(exchange ? ceil_div(chunks, ranks) * kTopkChunk : 0));
    bytes = static_cast<std::int64_t>(at - reinterpret_cast<std::uintptr_t>(rest));
  }

  // Whole octets, and not more than a quarter of the values.
  PYCOMM_HD static std::int64_t samples_of(std::int64_t n) {
    if (n <= kMostSamples) return 0;
    const std::int64_t some = n / 4 / kOctet * kOctet;
    return some < kMostSamples ? some : kMostSamples;
  }
  // The i-th octet of the sample: one in each of as many equal ranges, at random, so that no period in
  // the tensor can mislead.
  PYCOMM_HD static std::int64_t sampled_octet(std::int64_t i, std::int64_t n) {
    const std::int64_t ranges = samples_of(n) / kOctet, octets = n / kOctet;
    const std::int64_t begin = i * octets / ranges, end = (i + 1) * octets / ranges;
    const std::uint32_t hash = static_cast<std::uint32_t>(i) * 2654435769u;
    return begin + static_cast<std::int64_t>(std::uint64_t{hash} * (end - begin) >> 32);
  }
  // Several times as many as a tile needs if large values are spread evenly.
  PYCOMM_HD static std::int64_t slots_of(std::int64_t n, std::int64_t k) {
    const std::int64_t even = n == 0 ? 0 : ceil_div(k * kBlockElements, n);
    const std::int64_t most = round_up(4 * even + 64, kOctet);
    return most < kBlockElements ? most : kBlockElements;
  }
};

// A block's view of a part.
struct TopkBlock {
  const TopkLaunch& launch;
  const Share share;
  const PartRow& me;
  const Feedback& feedback;
  const Codec& codec;
  const TopkArea area;
  const TopkScratch scratch;

  __device__ TopkBlock(const TopkLaunch& launch, const Share& share)
      : launch(launch),
        share(share),
        me(fetch(launch, share.rank, share.part)),
        feedback(me.feedback),
        codec(me.operation.codec),
        area(me.operation, launch.layout.ranks),
        scratch(me.zeroed, me.scratch, n(), codec.k, ranks(), exchanges()) {}

  // False for one rank without a window.
  __device__ bool exchanges() const { return me.windows != nullptr; }
  __device__ std::int64_t n() const { return me.operation.count; }
  __device__ int ranks() const { return launch.layout.ranks; }
  __device__ TopkRegion region(int owner) const { return area.region(owner); }

  // The tensor's index of element p of this region's sums.
  __device__ std::int64_t element(std::int64_t p) const {
    return region(me.rank).chunk(p / kTopkChunk).begin + p % kTopkChunk;
  }

  // The number of selected entries before a chunk.
  __device__ std::int64_t entries_before_tile(std::int64_t tile) const {
    const std::uint32_t equal = scratch.equal[tile], ties = *scratch.ties;
    return scratch.above[tile] + (equal < ties ? equal : ties);
  }
  __device__ std::int64_t entries_before_chunk(std::int64_t chunk, std::int64_t of) const {
    const std::int64_t tile = chunk * (kTopkChunk / kBlockElements),
                       tiles = ceil_div(of, kBlockElements);
    return entries_before_tile(tile < tiles ? tile : tiles);
  }

  // True if a lane of this rank has drained; then the caller's tensors are not written.
  __device__ bool failed() const {
    if (!exchanges()) return false;
    bool failed = false;
    for (int i = 0; i < launch.layout.lanes; ++i) failed |= state(i).failed != 0;
    return failed;
  }
  __device__ const LaneState& state(int lane) const {
    return *reinterpret_cast<const LaneState*>(me.windows[me.rank] + launch.layout.state(lane));
  }
  // True if residuals take part; valid after the first announcement.
  __device__ bool feeds() const {
    return feedback.residual != nullptr && *scratch.keep == 0 && !failed();
  }
  __device__ Preflight preflight() const {
    const Found& found = scratch.found[0];
    const float limit = largest_safe(me.operation, ranks());
    return make_preflight(found.largest > magnitude(limit),
                          feedback.hold_unused && found.used == 0);
  }
  __device__ void report_nonfinite() const {
    if (me.nonfinite != nullptr) atomicOr(me.nonfinite, 1u);
  }
  // This rank's staging for the next announcement: preflights, then the lists of each part.
  __device__ std::byte* staging() const {
    return me.windows[me.rank] + launch.layout.staging(next_sequence(state(0).sequence), 0, 0);
  }
  __device__ std::byte* lists() const {
    return exchanges() ? staging() + me.lists : launch.wire + sizeof(WireHeader);
  }
};

// The values to select from: the tensor plus its residual, or the sums.
template <class T>
struct Selector {
  const TopkBlock& block;
  const T* x;
  const float* residual;
  const float* velocity;
  float momentum;
  Scaling scaling;
  float limit;  // no value exceeds it unless there is an overflow
  std::int64_t n;
  std::uint32_t k;
  std::uint32_t* histograms;
  Found& found;

  __device__ explicit Selector(const TopkBlock& of)
      : block(of), found(of.scratch.found[of.launch.sums ? 1 : 0]) {
    const TopkRegion mine = of.region(of.me.rank);
    const bool sums = of.launch.sums;
    x = sums ? reinterpret_cast<const T*>(of.scratch.sums)
             : reinterpret_cast<const T*>(of.me.input);
    residual = sums ? nullptr : of.feedback.residual;
    velocity = sums ? nullptr : of.feedback.velocity;
    momentum = of.feedback.momentum;
    scaling = scaling_of(of.feedback);
    limit = largest_safe(of.me.operation, of.ranks());
    n = sums ? mine.elements() : of.n();
    k = static_cast<std::uint32_t>(sums ? mine.share(of.codec.k) : of.codec.k);
    histograms = of.scratch.histograms + (sums ? TopkScratch::kBins : 0);
  }

  __device__ std::int64_t tiles() const { return ceil_div(n, kBlockElements); }

  // Loads this thread's eight elements of a tile, zeros beyond the end, and their new velocity if there
  // is one. Returns true if an element of x is not zero.
  __device__ bool load_values(std::int64_t start, float* v, float* faster = nullptr) const {
    const int count = octet_count(n - start);
    const Octet<T> octet = load_octet(x + start, count);
    bool used = false;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      v[i] = load(octet.element[i]);
      used |= magnitude(v[i]) != 0;
    }
    if (velocity != nullptr) {
      const Octet<float> speed = load_octet(velocity + start, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        v[i] = accelerated(speed.element[i], momentum, v[i], scaling.scale);
        if (faster != nullptr) faster[i] = v[i];
      }
    }
    if (residual != nullptr) {
      const Octet<float> kept = load_octet(residual + start, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        v[i] = limited(contribution(v[i], kept.element[i], scaling.scale), limit);
      }
    }
    // An infinite scale turns the padding beyond the end into NaN.
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = i < count ? v[i] : 0.0f;
    return used;
  }

  // True if the sample has misled: the floor is too high, so candidates are not enough.
  __device__ bool misled() const {
    return *block.scratch.floor != 0 && found.above + found.equal < k;
  }
  // True if all candidates are taken, and then the first of those that are equal to the floor.
  __device__ bool takes_all() const { return found.above < k && !misled(); }

  // From the first `digits` digits: the leading bits of the smallest magnitude that is taken, and how
  // many entries with these bits are taken. Returns false if it needs no digits.
  __device__ bool threshold(int digits, std::uint32_t& least, std::uint32_t& ties) const {
    least = k == 0 ? 0xffffffffu : takes_all() ? *block.scratch.floor : 0;
    ties = least == 0 || k == 0 ? 0 : k - found.above;
    if (k == 0 || takes_all()) return false;
    const std::uint32_t* bins = histograms;
    std::uint32_t prefix = 0, left = k, bin = 0;
    for (int digit = 0; digit < digits; ++digit) {
      if (!pick_bin(bins, digit_bins(digit), left, bin)) return false;
      prefix = digit == 0 ? bin : prefix * digit_bins(digit) + bin;
      bins += digit_bins(digit);
    }
    least = prefix;
    ties = left;
    return true;
  }
};

// Where a block keeps the encoded indices of one chunk.
__device__ inline std::uint32_t* index_words() {
  __shared__ std::uint32_t words[kMostIndexWords];
  return words;
}

void launch_topk_selection(TopkLaunch& launch, bool sums, cudaStream_t stream);
void launch_topk_lists(const TopkLaunch& launch, cudaStream_t stream);
void launch_topk_results(const TopkLaunch& launch, cudaStream_t stream);

}  // namespace pycomm::cuda

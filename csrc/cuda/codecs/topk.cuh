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
  int digit = 0;         // the digit that is counted,
  bool samples = false;  // in the sample, or else among the candidates
  bool sums = false;     // true: select among the sums of this rank's region; false: in the tensor
  std::byte* wire = nullptr;  // without a window: where the list goes, after its header
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
  std::uint32_t floor;    // larger values are candidates
  std::uint32_t above;    // how many there are
  std::uint32_t equal;    // values that are equal to the floor
  std::uint32_t largest;  // the largest magnitude(); 0x7fffffff if there is a NaN
  std::uint32_t used;     // not zero: an element of the tensor is not
};

// The search for the smallest magnitude among the largest of some values, digit by digit. Each kernel
// that counts a digit, or needs the result, first decides the digit before.
struct DigitSearch {
  struct Step {
    std::uint32_t prefix;  // the digits that are decided
    std::uint32_t left;    // how many values with these digits are taken; 0: there are too few
  };
  Step steps[kDigits];
  std::uint32_t bins[digit_bins(0) + digit_bins(1) + digit_bins(2)];

  PYCOMM_HD std::uint32_t* of(int digit) {
    return bins + (digit > 0 ? digit_bins(0) : 0) + (digit > 1 ? digit_bins(1) : 0);
  }

  // What the first `digits` digits are, if so many values are `wanted`; it is asked for the first digit
  // only. All threads of the block call it together; one `stores` the step.
  __device__ Step decide(int digits, std::uint32_t wanted, bool stores) {
    Step step = digits < 2 ? Step{0, wanted} : steps[digits - 2];
    if (digits == 0 || step.left == 0) return step;
    const int count = digit_bins(digits - 1);
    std::uint32_t bin = 0;
    if (!pick_bin(of(digits - 1), count, step.left, bin)) return {};
    step.prefix = digits == 1 ? bin : step.prefix * count + bin;
    if (stores) steps[digits - 1] = step;
    return step;
  }
};

// What a warp loads at once: so many octets per lane.
inline constexpr int kOctets = 4;
inline constexpr std::int64_t kStretch = 32 * kOctets * kOctet;

struct alignas(8) Candidate {
  float value;
  std::uint32_t index;
};

// The counts of a section, which has neighbouring values.
struct Tally {
  std::uint32_t listed;  // candidates, even if they have no slots
  std::uint32_t above;   // entries that are larger than the smallest one that is taken
  std::uint32_t equal;   // values that are as large
};

// Device memory of one part: what must be zero at the start, and the rest.
struct TopkScratch {
  static constexpr std::int64_t kMostSamples = std::int64_t{1} << 18, kMostSections = 8192;

  Found* found;                    // in the tensor, then in the sums
  DigitSearch* candidates_search;  // likewise
  DigitSearch* sample_search;      // likewise
  std::uint32_t* keep;             // not zero: residuals stay unchanged
  Tally* tallies;                  // per section
  Candidate* candidates;           // in order of sections, `slots` for each stretch
  std::int64_t slots;
  std::uint32_t* before;   // per tile: selected entries in the tiles before it
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
      : found(reinterpret_cast<Found*>(zeroed)),
        candidates_search(reinterpret_cast<DigitSearch*>(found + 2)),
        sample_search(candidates_search + 2) {
    auto at = reinterpret_cast<std::uintptr_t>(rest);
    const auto take = [&at](std::int64_t words) {
      const std::uintptr_t begin = at;
      at += static_cast<std::uintptr_t>(round_up(words * 4, 256));
      return reinterpret_cast<std::uint32_t*>(begin);
    };
    const std::int64_t chunks = topk_chunks(n);
    slots = slots_of(n, k);
    keep = take(1);
    tallies = reinterpret_cast<Tally*>(take(3 * most_sections(n)));
    candidates = reinterpret_cast<Candidate*>(take(ceil_div(n, kStretch) * slots * 2));
    before = take(ceil_div(n, kBlockElements) + 1);
    cuts = reinterpret_cast<Cut*>(take(2 * ranks));
    entries = take(ranks);
    begins = take(chunks);
    largest = take(chunks);
    indices = take(k);
    values = reinterpret_cast<float*>(take(k));
    sums = reinterpret_cast<float*>(take(exchange ? ceil_div(chunks, ranks) * kTopkChunk : 0));
    bytes = static_cast<std::int64_t>(at - reinterpret_cast<std::uintptr_t>(rest));
  }

  PYCOMM_HD static std::int64_t zeroed_bytes(std::int64_t n) {
    const std::int64_t searches = samples_of(n) == 0 ? 2 : 4;
    return 2 * sizeof(Found) + searches * static_cast<std::int64_t>(sizeof(DigitSearch));
  }
  // Whole octets; none of a tensor that takes no longer than its sample would.
  PYCOMM_HD static std::int64_t samples_of(std::int64_t n) {
    if (n <= kTopkChunk) return 0;
    const std::int64_t some = n / 32 / kOctet * kOctet;
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
  PYCOMM_HD static std::int64_t most_sections(std::int64_t n) {
    const std::int64_t stretches = ceil_div(n, kStretch);
    return stretches < 1 ? 1 : stretches < kMostSections ? stretches : kMostSections;
  }
  // Several times as many as a stretch needs if large values are spread evenly.
  PYCOMM_HD static std::int64_t slots_of(std::int64_t n, std::int64_t k) {
    const std::int64_t even = n == 0 ? 0 : ceil_div(k * kStretch, n), most = 4 * even + 8;
    return most < kStretch ? most : kStretch;
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

  // The number of selected entries before a tile, and before a chunk of a tensor with `of` elements.
  __device__ std::int64_t entries_before_tile(std::int64_t tile) const {
    return scratch.before[tile];
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
    return *reinterpret_cast<const LaneState*>(me.window + launch.layout.state(lane));
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
    return me.window + launch.layout.staging(next_sequence(state(0).sequence), 0, 0);
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
  Scaling scaling;
  float limit;  // no value exceeds it unless there is an overflow
  std::int64_t n;
  std::uint32_t k;
  Found& found;
  DigitSearch& search;

  __device__ explicit Selector(const TopkBlock& of)
      : block(of),
        found(of.scratch.found[of.launch.sums ? 1 : 0]),
        search((of.launch.samples ? of.scratch.sample_search
                                  : of.scratch.candidates_search)[of.launch.sums ? 1 : 0]) {
    const TopkRegion mine = of.region(of.me.rank);
    const bool sums = of.launch.sums;
    x = sums ? reinterpret_cast<const T*>(of.scratch.sums)
             : reinterpret_cast<const T*>(of.me.input);
    scaling = scaling_of(of.feedback);
    limit = largest_safe(of.me.operation, of.ranks());
    n = sums ? mine.elements() : of.n();
    k = static_cast<std::uint32_t>(sums ? mine.share(of.codec.k) : of.codec.k);
  }

  __device__ std::int64_t tiles() const { return ceil_div(n, kBlockElements); }
  // Sums have neither. Not kept in registers.
  __device__ const float* residual() const {
    return block.launch.sums ? nullptr : block.feedback.residual;
  }
  __device__ const float* velocity() const {
    return block.launch.sums ? nullptr : block.feedback.velocity;
  }
  __device__ bool feeds() const { return residual() != nullptr || velocity() != nullptr; }

  __device__ float accelerate(float v, float speed) const {
    return accelerated(speed, block.feedback.momentum, v, scaling.scale);
  }
  __device__ float feed(float v, float kept) const {
    return limited(contribution(v, kept, scaling.scale), limit);
  }
  __device__ float value(std::int64_t i) const {
    float v = load(x[i]);
    if (velocity() != nullptr) v = accelerate(v, velocity()[i]);
    return residual() == nullptr ? v : feed(v, residual()[i]);
  }

  // Loads eight neighbours, zeros beyond the end, and their new velocity if there is one. Returns true
  // if an element of x is not zero.
  __device__ bool load_values(std::int64_t start, float* v, float* faster = nullptr) const {
    const int count = octet_count(n - start);
    const Octet<T> octet = load_octet(x + start, count);
    bool used = false;
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      v[i] = load(octet.element[i]);
      used |= magnitude(v[i]) != 0;
    }
    if (velocity() != nullptr) {
      const Octet<float> speed = load_octet(velocity() + start, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        v[i] = accelerate(v[i], speed.element[i]);
        if (faster != nullptr) faster[i] = v[i];
      }
    }
    if (residual() != nullptr) {
      const Octet<float> kept = load_octet(residual() + start, count);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = feed(v[i], kept.element[i]);
    }
    // An infinite scale turns the padding beyond the end into NaN.
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = i < count ? v[i] : 0.0f;
    return used;
  }

  // True if the sample has misled: the floor is too high, so candidates are not enough.
  __device__ bool misled() const { return found.floor != 0 && found.above + found.equal < k; }
  // True if all candidates are taken, and then the first of those that are equal to the floor.
  __device__ bool takes_all() const { return found.above < k && !misled(); }
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

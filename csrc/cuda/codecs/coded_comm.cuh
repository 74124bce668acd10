// The CUDA executor with a codec of blocks, as cpu/codecs/coded_comm.h is the CPU's: the same
// algorithms, but slots hold encoded elements. A lane's slots are one encoded tile, and lanes cut
// the tensor at multiples of the largest block, so two-shot's owners and bits are those of the CPU.
#pragma once

#include "cuda/codecs/bucket.cuh"
#include "cuda/codecs/runs.cuh"
#include "cuda/comm.cuh"

namespace pycomm::cuda {

// What launch_preflight() has found, as bits in a part's zeroed memory.
inline constexpr std::uint32_t kOverflow = 1, kUsed = 2;

// What a rank tells of a part when it announces it.
__device__ inline Preflight preflight_of(const PartRow& row) {
  if (row.feedback.residual == nullptr) return {};
  const std::uint32_t found = *reinterpret_cast<const std::uint32_t*>(row.zeroed);
  return make_preflight((found & kOverflow) != 0, row.feedback.hold_unused && (found & kUsed) == 0);
}

// `Codecs`: the table that has the operation's codec. `takes_runs`: passes take runs of elements
// (runs.cuh), which need more registers.
template <class T, class Codecs = BlockCodecs, bool takes_runs = false>
class CodedComm {
 public:
  static constexpr bool kCoded = true;

  __device__ CodedComm(BlockComm<T>& comm, const PartRow& row, const LaneStaging& staging)
      : comm_(comm), row_(row), staging_(staging) {
    comm_.set_preflight(preflight_of(row));
  }

  // Reports a value that was not finite, if this block has seen one.
  __device__ void finish() {
    const bool any = __syncthreads_or(nonfinite_ || preflight_.overflow != 0) != 0;
    if (any && threadIdx.x == 0 && row_.nonfinite != nullptr) atomicOr(row_.nonfinite, 1u);
  }

  __device__ int rank() const { return comm_.rank(); }
  __device__ int size() const { return comm_.size(); }
  __device__ std::int64_t count() const { return comm_.count(); }
  // A whole stride, so that only the last one of a tensor is short.
  __device__ std::int64_t line() const { return kBlockElements; }
  __device__ std::int64_t elements(std::int64_t bytes) const {
    return comm_.elements(bytes) / kLargestBlock * kLargestBlock;
  }
  __device__ bool zero_copy() const { return false; }
  __device__ Location input() const { return comm_.input(); }
  __device__ Location output() const { return comm_.output(); }
  __device__ Location input(int) const { return comm_.input(); }
  __device__ Location output(int) const { return comm_.output(); }
  __device__ Location slot(int r, std::int64_t i) const {
    std::byte* const slots = comm_.window(r) + staging_.begin(comm_.sequence(), comm_.lane());
    return {slots, r, i * staging_.slot};
  }
  __device__ std::int64_t slot_count() const { return staging_.slot; }
  __device__ Location at(Location location, std::int64_t elements) const {
    if (location.coded == kPlain) return comm_.at(location, elements);
    return {location.data, location.rank, location.coded + elements};
  }

  __device__ void announce() {
    comm_.announce();
    preflight_ = comm_.preflight();
  }

  // These are not inlined: a pass needs the registers that an algorithm would hold.
  __device__ void signal(int channel) { comm_.signal(channel); }
  __device__ __noinline__ void wait(int r, int channel, std::int64_t step) {
    comm_.wait(r, channel, step);
  }
  __device__ __noinline__ void wait_all(int channel, std::int64_t step) {
    comm_.wait_all(channel, step);
  }
  __device__ __noinline__ void copy(Location to, Location from, std::int64_t n) {
    if (comm_.failed() || n == 0 || (to.data == from.data && to.coded == from.coded)) return;
    if (from.coded == kPlain) {
      const Sources sources = sources_of(1, [&](int) { return from; });
      encode(sources, to, to, n, false);
    } else if (to.coded == kPlain) {
      nonfinite_ |= decode_pass<T, Codecs, takes_runs>(
          row_.operation.codec, staging_[from], reinterpret_cast<T*>(to.data), n, staging_.shift);
      __syncthreads();
    } else {
      move(staging_[to], staging_[from], n);
    }
  }

  template <class To, class From>
  __device__ void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool last) {
    if (comm_.failed() || n == 0) return;
    const Sources sources = sources_of(n_from, from);
    const Location first = to(0), second = to(n_to - 1);
    const bool swapped = first.coded == kPlain;
    encode(sources, swapped ? second : first, swapped ? first : second, n, last);
  }

  // Two-shot's chunks: as large as slots allow.
  __device__ CyclicChunks<CodedComm> chunks() {
    return {*this, first_element(row_.operation) + comm_.begin(), staging_.piece(size())};
  }

 private:
  __device__ std::int64_t index(Location tensor, Location begin) const {
    return comm_.elements(tensor.data - begin.data);
  }

  __device__ Source source(Location location) const {
    if (location.coded == kPlain) return {{location.data, nullptr}, true};
    return {staging_[location], false};
  }

  // In shared memory. If one is the own contribution, it begins at element `own_element`.
  struct Sources {
    const Source* from;
    int count;
    bool own;
    std::int64_t own_element;
  };

  template <class From>
  __device__ Sources sources_of(int count, From from) const {
    __shared__ Source sources[kMaxRanks + 1];
    __shared__ std::int64_t own_element;
    bool own = false;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const Location location = from(i);
      sources[i] = source(location);
      if (!sources[i].own) continue;
      own = true;
      own_element = index(location, input());
    }
    own = __syncthreads_or(own) != 0;
    return {sources, count, own, own_element};
  }

  // Without an output, `output` is `to`.
  __device__ __noinline__ void encode(const Sources& sources, Location to, Location output,
                                      std::int64_t n, bool last) {
    const Feedback& feedback = row_.feedback;
    const bool writes = output.coded == kPlain;
    const std::int64_t element =
        comm_.begin() + (writes ? index(output, this->output()) : sources.own_element);
    Pass pass;
    pass.from = sources.from;
    pass.n_from = sources.count;
    pass.to = staging_[to];
    if (writes) pass.output = output.data;
    if (feedback.residual != nullptr && preflight_.unused == 0) {
      pass.residual = feedback.residual + element;
    }
    pass.scaling = scaling_of(feedback);
    if (preflight_.overflow != 0) pass.limit = largest_safe(row_.operation, size());
    pass.last = last;
    if (last && row_.operation.op == ReduceOp::avg) pass.divisor = static_cast<float>(size());
    pass.n = n;
    pass.random = {feedback.seed, feedback.step,
                   last ? kResultStream : static_cast<std::uint32_t>(rank())};
    pass.first = first_element(row_.operation) + element;
    nonfinite_ |=
        encode_pass<T, Codecs, takes_runs>(row_.operation.codec, pass, sources.own, staging_.shift);
    __syncthreads();
  }

  // Encoded elements from slot to slot, as they are.
  __device__ void move(const Encoded& to, const Encoded& from, std::int64_t n) {
    const std::int64_t words = ceil_div(n * staging_.payload, 8);
    auto* const target = reinterpret_cast<std::uint64_t*>(to.payload);
    const auto* const source = reinterpret_cast<const std::uint64_t*>(from.payload);
#pragma unroll 4
    for (std::int64_t i = threadIdx.x; i < words; i += blockDim.x) target[i] = source[i];
    const std::int64_t scales =
        is_scaled(row_.operation.codec) ? (n + staging_.block - 1) >> staging_.shift : 0;
    for (std::int64_t i = threadIdx.x; i < scales; i += blockDim.x) to.scales[i] = from.scales[i];
    __syncthreads();
  }

  BlockComm<T>& comm_;
  const PartRow& row_;
  const LaneStaging& staging_;
  Preflight preflight_;     // of all ranks
  bool nonfinite_ = false;  // of this thread's elements
};

static_assert(Executor<CodedComm<float>>);

}  // namespace pycomm::cuda

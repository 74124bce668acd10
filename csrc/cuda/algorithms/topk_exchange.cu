// Top-k between ranks: cpu/codecs/topk_comm.h as kernels. Ranks synchronize by announcements: after the
// first one the lists are ready for their owners, after the second one the results are.
#include "cuda/codecs/topk_reader.cuh"

namespace pycomm::cuda {
namespace {

__device__ void store_unscaled(float* to, Octet<float> octet, int n, const Scaling& scaling) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) octet.element[i] *= scaling.inverse;
  store_octet(to, octet, n);
}

// First stores the fed-back values, from which top-k selects, in residual and velocity; then removes
// the elements that are sent.
template <class T>
__device__ void feed(const TopkBlock& block) {
  const Selector<T> from(block);
  const TopkScratch& scratch = block.scratch;
  const Feedback& feedback = block.feedback;
  for (std::int64_t tile = block.share.first; tile < from.tiles(); tile += block.share.stride) {
    const std::int64_t start = tile * kBlockElements + threadIdx.x * kOctet;
    const int n = octet_count(from.n - start);
    Octet<float> v, faster;
    from.load_values(start, v.element, faster.element);
    store_unscaled(feedback.residual + start, v, n, from.scaling);
    if (feedback.velocity != nullptr) {
      store_unscaled(feedback.velocity + start, faster, n, from.scaling);
    }
    __syncthreads();
    const std::int64_t end = block.entries_before_tile(tile + 1);
    for (std::int64_t i = block.entries_before_tile(tile) + threadIdx.x; i < end; i += kThreads) {
      const std::uint32_t index = scratch.indices[i];
      const std::int64_t chunk = index / kTopkChunk;
      const float value = scratch.values[i];
      if (!scratch.cuts[block.area.owner(chunk)].keeps(index, magnitude(value))) continue;
      const bool scaled = block.codec.values == DType::u8;
      const BlockScale scale = int8_scale(scaled ? scratch.largest[chunk] : 0);
      const float sent = through_wire(value, block.codec.values, scale);
      feedback.residual[index] = lost(value, sent, from.scaling.inverse);
      if (feedback.velocity != nullptr) feedback.velocity[index] = 0;
    }
  }
}

// Sums of this rank's region, in rank order; zeros if no rank uses the tensor.
template <class Comm>
__device__ void add_lists(const TopkBlock& block, const Comm& comm, bool unused) {
  const int me = comm.rank(), lists = unused ? 0 : comm.size();
  const TopkRegion mine = block.region(me);
  const TopkArea& area = block.area;
  for (std::int64_t j = block.share.first; j < mine.chunks(); j += block.share.stride) {
    const Range range = mine.chunk(j);
    float* const sums = block.scratch.sums + j * kTopkChunk;
    for (std::int64_t i = threadIdx.x; i < range.count; i += kThreads) sums[i] = 0;
    for (int r = 0; r < lists; ++r) {
      const ChunkReader list(mine, j, block.codec.values,
                             comm.area(r) + block.me.lists + area.list(me), area.room(me, false));
      list.read([&](std::int64_t index, float value) { sums[index] += value; });
    }
  }
}

// What all ranks tell of a part.
template <class Comm>
__device__ Preflight preflight_of_all(const TopkBlock& block, const Comm& comm) {
  if (block.feedback.residual == nullptr) return {};
  Preflight all = kNeutralPreflight;
  for (int r = threadIdx.x; r < comm.size(); r += kThreads) {
    all = all | reinterpret_cast<const Preflight*>(comm.area(r))[block.share.part];
  }
  const bool overflow = __syncthreads_or(all.overflow) != 0;
  return make_preflight(overflow, __syncthreads_or(all.unused == 0) == 0);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    meet_kernel(const __grid_constant__ TopkLaunch launch) {
  BlockComm<T> comm(launch);
  comm.announce();
  for (int part = 0; part < launch.parts && !comm.failed(); ++part) {
    const TopkBlock block(launch, share_of_lane(launch, part));
    const Preflight preflight = preflight_of_all(block, comm);
    const bool overflow = preflight.overflow != 0, unused = preflight.unused != 0;
    if (block.share.first == 0 && threadIdx.x == 0) {
      *block.scratch.keep = overflow || unused ? 1 : 0;
      if (overflow) block.report_nonfinite();
    }
    if (block.feedback.residual != nullptr && !overflow && !unused) feed<T>(block);
    add_lists(block, comm, unused);
  }
  comm.finish(false);
}

// Writes every owner's result; all other elements become zero.
template <class T, class Comm>
__device__ bool gather(const TopkBlock& block, const Comm& comm) {
  const TopkArea& area = block.area;
  bool finite = true;
  for (std::int64_t c = block.share.first; c < topk_chunks(block.n()); c += block.share.stride) {
    const int owner = area.owner(c);
    const TopkRegion region = block.region(owner);
    const std::int64_t j = c / comm.size();
    const ChunkReader list(region, j, block.codec.values,
                           comm.area(owner) + block.me.lists + area.result(),
                           area.room(owner, true));
    const Range range = region.chunk(j);
    T* const to = reinterpret_cast<T*>(block.me.output) + range.begin;
    for (std::int64_t i = threadIdx.x; i < range.count; i += kThreads) to[i] = T{};
    list.read([&](std::int64_t index, float value) {
      to[index] = store<T>(value);
      finite = finite && magnitude(load(to[index])) < kInfinityBits;
    });
  }
  return finite;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    gather_kernel(const __grid_constant__ TopkLaunch launch) {
  BlockComm<T> comm(launch);
  comm.announce();
  for (int part = 0; part < launch.parts && !comm.failed(); ++part) {
    const TopkBlock block(launch, share_of_lane(launch, part));
    if (!gather<T>(block, comm)) block.report_nonfinite();
  }
  comm.finish();
}

}  // namespace

void launch_topk_exchange(const CodedLaunch& coded, cudaStream_t stream) {
  TopkLaunch launch{coded};
  launch_topk_selection(launch, false, stream);
  launch_topk_lists(launch, stream);
  visit_compressible(launch.ranks[0].operation.dtype, [&](auto element) {
    launch_meeting<&meet_kernel<decltype(element)>>(launch, stream);
  });
  launch_topk_selection(launch, true, stream);
  launch_topk_results(launch, stream);
  visit_compressible(launch.ranks[0].operation.dtype, [&](auto element) {
    launch_meeting<&gather_kernel<decltype(element)>>(launch, stream);
  });
}

}  // namespace pycomm::cuda

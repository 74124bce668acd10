// Top-k outside of a group: selection, and encoded lists in ordinary memory.
#include <algorithm>
#include <vector>

#include "cuda/codecs/topk_reader.cuh"
#include "cuda/codecs/wire.h"

namespace pycomm::cuda {
namespace {

// The workspace begins with a word that kernels write for the host; a bucket's follows.
constexpr std::int64_t kWord = 256;

std::uint32_t* word_of(const WireJob& job) {
  return reinterpret_cast<std::uint32_t*>(job.workspace);
}
cudaStream_t stream_of(const WireJob& job) { return reinterpret_cast<cudaStream_t>(job.stream); }

std::vector<Part> parts_of(const Codec& codec, std::int64_t n) {
  Part part;
  part.operation.count = n;
  part.operation.codec = codec;
  return {part};
}

// A launch for one rank without a window.
TopkLaunch prepare(const WireJob& job) {
  Bucket bucket{parts_of(job.codec, job.n), nullptr, job.workspace + kWord};
  bucket.parts[0].operation.dtype = job.dtype;
  bucket.parts[0].input = job.elements;
  Launch launch{};
  launch.layout = {1, 1, 0};
  launch.local_ranks = 1;
  launch.ranks[0].operation = bucket.parts[0].operation;
  TopkLaunch made{prepare(launch, &bucket, stream_of(job))};
  made.wire = job.wire;
  return made;
}

void copy_to_host(void* to, const void* from, std::int64_t bytes, cudaStream_t stream) {
  PYCOMM_CUDA_CHECK(
      cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream));
  PYCOMM_CUDA_CHECK(cudaStreamSynchronize(stream));
}

struct Export {
  TopkLaunch launch;
  std::int64_t* indices;
  float* values;
  std::uint32_t* count;
};

// Writes the selected entries and their number.
__global__ void __launch_bounds__(kThreads) export_kernel(const __grid_constant__ Export to) {
  const TopkBlock block(to.launch, share_of_block(to.launch));
  const std::int64_t found = block.entries_before_tile(ceil_div(block.n(), kBlockElements));
  for (std::int64_t i = block.share.first * kThreads + threadIdx.x; i < found;
       i += block.share.stride * kThreads) {
    to.indices[i] = block.scratch.indices[i];
    to.values[i] = block.scratch.values[i];
  }
  if (block.share.first == 0 && threadIdx.x == 0) *to.count = static_cast<std::uint32_t>(found);
}

__global__ void __launch_bounds__(kThreads) header_kernel(const __grid_constant__ WireJob job) {
  const WireHeader header = header_of(job.codec, job.n);
  for (std::size_t i = threadIdx.x; i < sizeof(header); i += kThreads) {
    job.wire[i] = reinterpret_cast<const std::byte*>(&header)[i];
  }
}

struct Decode {
  WireJob job;
  std::int64_t bytes;
  bool add;
};

// Reports wrong indices in the workspace.
template <class T>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ Decode decode) {
  const WireJob& job = decode.job;
  const TopkRegion all{job.n, 1, 0};
  for (std::int64_t chunk = blockIdx.x; chunk < all.chunks(); chunk += gridDim.x) {
    const Range range = all.chunk(chunk);
    const ChunkReader list(all, chunk, job.codec.values, job.wire + sizeof(WireHeader),
                           decode.bytes - static_cast<std::int64_t>(sizeof(WireHeader)));
    T* const to = reinterpret_cast<T*>(job.elements) + range.begin;
    for (std::int64_t i = threadIdx.x; i < range.count && !decode.add; i += kThreads) to[i] = T{};
    const bool valid = list.read([&](std::int64_t index, float value) {
      to[index] = store<T>(decode.add ? load(to[index]) + value : value);
    });
    if (!valid) *reinterpret_cast<std::uint32_t*>(job.workspace) = 1;
  }
}

// Checks the counts at the beginning of a list, and that the list is long enough for them.
void check_list(const WireJob& job, std::int64_t bytes) {
  const TopkRegion all{job.n, 1, 0};
  TopkLayout layout{all.chunks(), 0, job.codec.values};
  const auto check_length = [&](std::int64_t needed, std::int64_t number, const char* what) {
    PYCOMM_CHECK(needed <= bytes, "encoded list is truncated: " + std::to_string(bytes) +
                                      " bytes for " + std::to_string(number) + what);
  };
  check_length(layout.indices(), layout.chunks, " chunks");
  std::vector<std::uint32_t> counts(static_cast<std::size_t>(layout.chunks));
  copy_to_host(counts.data(), job.wire + sizeof(WireHeader), layout.chunks * 4, stream_of(job));
  std::int64_t words = 0;
  for (std::int64_t j = 0; j < layout.chunks; ++j) {
    const std::int64_t count = counts[static_cast<std::size_t>(j)], room = all.chunk(j).count;
    PYCOMM_CHECK(count <= room, "encoded list has " + std::to_string(count) +
                                    " entries in a chunk of " + std::to_string(room));
    layout.entries += count;
    words += TopkIndices{count, room}.words();
  }
  check_length(layout.indices() + words * 4, layout.entries, " entries");
}

}  // namespace

std::int64_t workspace_bytes(const Codec& codec, std::int64_t n) {
  return codec.kind == CodecKind::topk ? kWord + workspace_bytes(parts_of(codec, n), 1) : 0;
}

void encode_topk(const WireJob& job) {
  TopkLaunch launch = prepare(job);
  PYCOMM_CUDA_CHECK(cudaMemsetAsync(
      job.wire, 0, static_cast<std::size_t>(encoded_bytes(job.codec, job.n)), stream_of(job)));
  launch_blocks<&header_kernel>(1, job, stream_of(job));
  launch_topk_selection(launch, false, stream_of(job));
  launch_topk_lists(launch, stream_of(job));
}

void decode_topk(const WireJob& job, std::int64_t bytes, bool add, bool checks) {
  if (checks) check_list(job, bytes - static_cast<std::int64_t>(sizeof(WireHeader)));
  PYCOMM_CUDA_CHECK(cudaMemsetAsync(job.workspace, 0, 4, stream_of(job)));
  visit_compressible(job.dtype, [&](auto element) {
    launch_blocks<&decode_kernel<decltype(element)>>(
        std::clamp<std::int64_t>(topk_chunks(job.n), 1, 1024), Decode{job, bytes, add},
        stream_of(job));
  });
  if (!checks) return;
  std::uint32_t wrong = 0;
  copy_to_host(&wrong, job.workspace, sizeof(wrong), stream_of(job));
  PYCOMM_CHECK(wrong == 0, "encoded list has a wrong index");
}

std::int64_t select(const WireJob& job, std::int64_t* indices, float* values) {
  const DeviceGuard guard(job.device);
  TopkLaunch launch = prepare(job);
  launch_topk_selection(launch, false, stream_of(job));
  launch_blocks<&export_kernel>(launch.blocks, Export{launch, indices, values, word_of(job)},
                                stream_of(job));
  std::uint32_t found = 0;
  copy_to_host(&found, word_of(job), sizeof(found), stream_of(job));
  return found;
}

}  // namespace pycomm::cuda

// Makes a bucket's table, and runs what comes before a compressed operation: copies of old residuals, and
// what a rank knows of its tensors. With feedback, the announcement must tell whether they may be summed,
// and whether they are used.
#include "cuda/codecs/bucket.cuh"

#include <algorithm>

#include "cuda/codecs/coded_comm.cuh"
#include "cuda/codecs/coded_launch.cuh"
#include "cuda/codecs/topk.cuh"
#include "cuda/device_words.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {
namespace {

std::int64_t zeroed_bytes(const Operation& operation) {
  return operation.codec.kind == CodecKind::topk ? TopkScratch::zeroed_bytes(operation.count)
                                                 : sizeof(std::uint32_t);
}
std::int64_t scratch_bytes(const Operation& operation, int ranks, bool exchange) {
  if (operation.codec.kind != CodecKind::topk) return 0;
  return TopkScratch(nullptr, nullptr, operation.count, operation.codec.k, ranks, exchange).bytes;
}

// Where the parts of a workspace begin.
struct Space {
  std::int64_t zeroed;   // what must be zero, of all parts
  std::int64_t scratch;  // of all parts

  explicit Space(const std::vector<Part>& parts) {
    zeroed = round_up(static_cast<std::int64_t>(parts.size() * sizeof(PartRow)), 256);
    std::int64_t bytes = 0;
    for (const Part& part : parts) bytes += zeroed_bytes(part.operation);
    scratch = zeroed + round_up(bytes, 256);
  }
};

// One rank's rows.
std::vector<PartRow> rows_of(const RankLaunch& rank, const Bucket& bucket, int ranks, int device) {
  constexpr int kPerProcessor = 2;  // blocks
  std::vector<PartRow> rows;
  const Space space(bucket.parts);
  std::byte* zeroed = bucket.workspace + space.zeroed;
  std::byte* scratch = bucket.workspace + space.scratch;
  std::int64_t first_block = 0;
  std::int64_t lists = preflight_bytes(bucket.parts.size());
  for (const Part& part : bucket.parts) {
    PartRow row{rank, part.feedback, bucket.nonfinite, zeroed, scratch, first_block, 0, lists};
    row.operation = part.operation;
    row.input = static_cast<std::byte*>(const_cast<void*>(part.input));
    row.output = static_cast<std::byte*>(part.output);
    row.blocks = blocks_for(ceil_div(part.operation.count, kBlockElements), kPerProcessor, device);
    first_block += row.blocks;
    zeroed += zeroed_bytes(part.operation);
    scratch += scratch_bytes(part.operation, ranks, rank.windows != nullptr);
    lists += most_list_bytes(part.operation, ranks);
    rows.push_back(row);
  }
  return rows;
}

// Calls visit(row, start) for this thread's eight elements in each of the block's tiles.
template <class Visit>
__device__ void each_octet(const CodedLaunch& launch, Visit visit) {
  const Share share = share_of_block(launch);
  const PartRow& row = fetch(launch, share.rank, share.part);
  const std::int64_t step = share.stride * kBlockElements;
  for (std::int64_t start = share.first * kBlockElements + threadIdx.x * kOctet;
       start < row.operation.count; start += step) {
    visit(row, start, octet_count(row.operation.count - start));
  }
}

__global__ void __launch_bounds__(kThreads)
    snapshot_kernel(const __grid_constant__ CodedLaunch launch) {
  each_octet(launch, [](const PartRow& row, std::int64_t start, int n) {
    const auto keep = [&](float* to, const float* from) {
      if (to != nullptr) store_octet(to + start, load_octet(from + start, n), n);
    };
    keep(row.feedback.residual_before, row.feedback.residual);
    keep(row.feedback.velocity_before, row.feedback.velocity);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    preflight_kernel(const __grid_constant__ CodedLaunch launch) {
  std::uint32_t largest = 0, limit = 0;
  std::uint32_t* found = nullptr;
  bool used = false;
  each_octet(launch, [&](const PartRow& row, std::int64_t start, int n) {
    const float scale = scaling_of(row.feedback).scale;
    found = reinterpret_cast<std::uint32_t*>(row.zeroed);
    limit = magnitude(largest_safe(row.operation, launch.layout.ranks));
    const Octet<T> octet = load_octet(reinterpret_cast<const T*>(row.input) + start, n);
    const Octet<float> kept = load_octet(row.feedback.residual + start, n);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float value = load(octet.element[i]);
      largest = max(largest, magnitude(contribution(value, kept.element[i], scale)));
      used |= magnitude(value) != 0;
    }
  });
  const bool overflow = __any_sync(0xffffffffu, largest > limit);
  used = __any_sync(0xffffffffu, used);
  // Tested as two flags: of `all != 0`, ptxas 13.0.88 makes "not both".
  const std::uint32_t all = (overflow ? kOverflow : 0) | (used ? kUsed : 0);
  if (threadIdx.x % 32 == 0 && (overflow || used)) atomicOr(found, all);
}

}  // namespace

std::int64_t workspace_bytes(const std::vector<Part>& parts, int ranks) {
  if (parts.empty()) return 0;
  std::int64_t bytes = Space(parts).scratch;
  for (const Part& part : parts) bytes += scratch_bytes(part.operation, ranks, true);
  return bytes;
}

CodedLaunch prepare(const Launch& launch, const Bucket* buckets, cudaStream_t stream) {
  const std::vector<Part>& parts = buckets[0].parts;
  const LaneStaging staging(launch.layout, parts[0].operation.codec);
  CodedLaunch made{launch, {}, static_cast<int>(parts.size()), 0, staging};
  int device = 0;
  PYCOMM_CUDA_CHECK(cudaGetDevice(&device));
  bool keeps = false;
  for (int i = 0; i < launch.local_ranks; ++i) {
    const Bucket& bucket = buckets[i];
    const Space space(bucket.parts);
    const auto rows = rows_of(launch.ranks[i], bucket, launch.layout.ranks, device);
    made.rows[i] = reinterpret_cast<PartRow*>(bucket.workspace);
    made.blocks = static_cast<int>(rows.back().first_block + rows.back().blocks);
    write_words(reinterpret_cast<std::uint64_t*>(bucket.workspace),
                reinterpret_cast<const std::uint64_t*>(rows.data()),
                rows.size() * sizeof(PartRow) / 8, reinterpret_cast<std::uintptr_t>(stream));
    PYCOMM_CUDA_CHECK(cudaMemsetAsync(bucket.workspace + space.zeroed, 0,
                                      static_cast<std::size_t>(space.scratch - space.zeroed),
                                      stream));
    for (const auto& [operation, input, output, feedback] : bucket.parts) {
      keeps |= feedback.residual_before != nullptr || feedback.velocity_before != nullptr;
    }
  }
  if (keeps) {
    launch_blocks<&snapshot_kernel>(std::int64_t{launch.local_ranks} * made.blocks, made, stream);
  }
  return made;
}

void launch_preflight(const CodedLaunch& launch, cudaStream_t stream) {
  visit_compressible(launch.ranks[0].operation.dtype, [&](auto element) {
    launch_blocks<&preflight_kernel<decltype(element)>>(
        std::int64_t{launch.local_ranks} * launch.blocks, launch, stream);
  });
}

}  // namespace pycomm::cuda

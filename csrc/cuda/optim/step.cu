#include "cuda/optim/step.h"

#include <algorithm>
#include <cstring>

#include "core/optim/table.h"
#include "cuda/optim/launch.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {
namespace {

// Words that one launch writes; they travel as kernel parameters.
struct Patch {
  std::uint64_t* to;
  std::int64_t count;
  std::uint64_t words[1000];
};
static_assert(sizeof(Patch) <= 8 << 10);

__global__ void __launch_bounds__(kThreads) patch_kernel(const __grid_constant__ Patch patch) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < patch.count) patch.to[i] = patch.words[i];
}

Table table_of(const StepJob& job) {
  return {static_cast<std::uint64_t*>(job.table->memory()), job.table->segments(),
          job.table->tiles()};
}

// The number of blocks that a device runs at once, or the number of pieces of work if that is less.
std::int64_t blocks_for(std::int64_t pieces, int per_processor, int device) {
  int processors = 0;
  PYCOMM_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return std::clamp<std::int64_t>(pieces, 1, std::int64_t{processors} * per_processor);
}

}  // namespace

std::int64_t SegmentTable::set(const std::vector<Segment>& segments) {
  segments_ = static_cast<std::int64_t>(segments.size());
  first_tiles_.assign(1, 0);
  for (const Segment& segment : segments) {
    first_tiles_.push_back(first_tiles_.back() + tiles_of(segment.count));
  }
  const Table table{nullptr, segments_, tiles()};
  wanted_.assign(static_cast<std::size_t>(table.written()), 0);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    std::uint64_t fields[kFields];
    std::memcpy(fields, &segments[s], sizeof(fields));
    for (std::size_t f = 0; f < kFields; ++f) wanted_[f * segments.size() + s] = fields[f];
  }
  std::copy(first_tiles_.begin(), first_tiles_.end(), wanted_.begin() + kFields * segments_);
  return table.size() * 8;
}

void SegmentTable::upload(void* memory, int device, std::uintptr_t stream) {
  // Forget the old content first: a launch may throw.
  const std::vector<std::uint64_t> before =
      memory == memory_ ? std::move(written_) : std::vector<std::uint64_t>();
  written_.clear();
  memory_ = memory;
  const auto differs = [&](std::size_t i) { return i >= before.size() || before[i] != wanted_[i]; };
  const DeviceGuard guard(device);
  for (std::size_t at = 0; at < wanted_.size();) {
    if (!differs(at)) {
      ++at;
      continue;
    }
    Patch patch;
    std::size_t end = std::min(wanted_.size(), at + std::size(patch.words));
    while (!differs(end - 1)) --end;
    patch.to = static_cast<std::uint64_t*>(memory) + at;
    patch.count = static_cast<std::int64_t>(end - at);
    std::copy(wanted_.data() + at, wanted_.data() + end, patch.words);
    launch_blocks(&patch_kernel, ceil_div(patch.count, kThreads), patch,
                  reinterpret_cast<cudaStream_t>(stream));
    at = end;
  }
  written_ = wanted_;
}

void grad_norm(const StepJob& job, const GradNormPass& pass) {
  const DeviceGuard guard(job.device);
  const GradNormLaunch launch{table_of(job), job.control, pass};
  launch_grad_norm(launch, blocks_for(launch.table.tiles, kGradNormBlocks, job.device),
                   reinterpret_cast<cudaStream_t>(job.stream));
}

void step(const StepJob& job, const ParamRange& params) {
  if (params.count == 0) return;
  const DeviceGuard guard(job.device);
  const StepLaunch launch{table_of(job), job.control, params};
  const auto stream = reinterpret_cast<cudaStream_t>(job.stream);
  const std::int64_t tiles = job.table->tiles(params.first, params.count);
  const std::int64_t blocks = blocks_for(tiles, kStepBlocks, job.device);
  if (params.settings.rule == Rule::lamb && params.settings.adapt) {
    launch_lamb_ratios(launch, blocks, stream);
  }
  Rules::visit(params.settings, [&](auto type) {
    launch_step<typename decltype(type)::type>(launch, blocks, stream);
  });
}

}  // namespace pycomm::cuda

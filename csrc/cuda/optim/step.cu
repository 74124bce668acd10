#include "cuda/optim/step.h"

#include <algorithm>
#include <cstring>

#include "core/optim/table.h"
#include "cuda/optim/launch.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {
namespace {

Table table_of(const StepJob& job) {
  return {static_cast<std::uint64_t*>(job.table->memory()), job.table->segments(),
          job.table->tiles()};
}

}  // namespace

std::int64_t SegmentTable::set(const std::vector<Segment>& segments) {
  segments_ = static_cast<std::int64_t>(segments.size());
  first_tiles_.assign(1, 0);
  for (const Segment& segment : segments) {
    first_tiles_.push_back(first_tiles_.back() + tiles_of(segment.count));
  }
  const Table table{nullptr, segments_, tiles()};
  std::vector<std::uint64_t> words(static_cast<std::size_t>(table.written()));
  for (std::size_t s = 0; s < segments.size(); ++s) {
    std::uint64_t fields[kFields];
    std::memcpy(fields, &segments[s], sizeof(fields));
    for (std::size_t f = 0; f < kFields; ++f) words[f * segments.size() + s] = fields[f];
  }
  std::copy(first_tiles_.begin(), first_tiles_.end(), words.begin() + kFields * segments_);
  words_.set(std::move(words));
  return table.size() * 8;
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
  if (params.settings.rule == Rule::lamb && params.settings.adapt) {
    launch_lamb_ratios(launch, blocks_for(tiles, kLambRatioBlocks, job.device), stream);
  }
  Rules::visit(params.settings, [&](auto type) {
    using Element = typename decltype(type)::type;
    launch_step<Element>(launch, blocks_for(tiles, step_blocks(Element::kStates), job.device),
                         stream);
  });
}

}  // namespace pycomm::cuda

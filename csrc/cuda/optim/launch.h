// The launchers of optimizer kernels. Each update is compiled in its own file, so that builds run in
// parallel.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/optim/table.h"

namespace pycomm::cuda {

// Blocks per multiprocessor: few enough that threads get the registers they need. Each thread has 100
// bytes or more in flight, which keeps memory busy.
constexpr int step_blocks(int states) { return states > 2 ? 2 : 3; }
inline constexpr int kLambRatioBlocks = 2;
inline constexpr int kGradNormBlocks = 3;

struct StepLaunch {
  Table table;
  StepControl control;
  ParamRange params;
};

struct GradNormLaunch {
  Table table;
  StepControl control;
  GradNormPass pass;
};

// Runs an element's update (core/optim/table.h).
template <class Element>
void launch_step(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream);

// `blocks` blocks share the sums of 1024 elements each.
void launch_lamb_ratios(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream);
void launch_grad_norm(const GradNormLaunch& launch, std::int64_t blocks, cudaStream_t stream);

}  // namespace pycomm::cuda

// The launchers of optimizer kernels. Each update is compiled in a file of its own, in seconds.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/optim/table.h"

namespace pycomm::cuda {

// Blocks per processor: few enough for all registers that a thread wants, and with 100 bytes and
// more under way for each of its threads enough to keep memory busy.
inline constexpr int kStepBlocks = 2;
inline constexpr int kGradNormBlocks = 5;

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

// `blocks` of these share out sums of 1024 elements.
void launch_lamb_ratios(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream);
void launch_grad_norm(const GradNormLaunch& launch, std::int64_t blocks, cudaStream_t stream);

}  // namespace pycomm::cuda

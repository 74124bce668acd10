#include "core/adamw.h"
#include "cuda/optim_step.cuh"

namespace pycomm::cuda {

void launch_amsgrad(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  launch_step<AdamW<true>>(launch, blocks, stream);
}

}  // namespace pycomm::cuda

#include "core/lion.h"
#include "cuda/optim_step.cuh"

namespace pycomm::cuda {

void launch_lion(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  launch_step<Lion>(launch, blocks, stream);
}

}  // namespace pycomm::cuda

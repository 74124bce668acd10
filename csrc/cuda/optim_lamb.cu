#include "core/lamb.h"
#include "cuda/optim_step.cuh"

namespace pycomm::cuda {

void launch_lamb(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  launch_step<Lamb>(launch, blocks, stream);
}

}  // namespace pycomm::cuda

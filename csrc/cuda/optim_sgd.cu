#include "core/sgd.h"
#include "cuda/optim_step.cuh"

namespace pycomm::cuda {

void launch_sgd(const StepLaunch& launch, std::int64_t blocks, cudaStream_t stream) {
  if (launch.group.settings.momentum != 0.0) {
    launch_step<Sgd<true>>(launch, blocks, stream);
  } else {
    launch_step<Sgd<false>>(launch, blocks, stream);
  }
}

}  // namespace pycomm::cuda

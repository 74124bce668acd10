#include "core/optim/lamb.h"
#include "cuda/optim/step.cuh"

namespace pycomm::cuda {

template void launch_step<Lamb>(const StepLaunch&, std::int64_t, cudaStream_t);

}  // namespace pycomm::cuda

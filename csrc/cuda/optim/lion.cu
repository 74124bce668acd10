#include "core/optim/lion.h"
#include "cuda/optim/step.cuh"

namespace pycomm::cuda {

template void launch_step<Lion>(const StepLaunch&, std::int64_t, cudaStream_t);

}  // namespace pycomm::cuda

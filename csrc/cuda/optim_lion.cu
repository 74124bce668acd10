#include "core/lion.h"
#include "cuda/optim_step.cuh"

namespace pycomm::cuda {

template void launch_step<Lion>(const StepLaunch&, std::int64_t, cudaStream_t);

}  // namespace pycomm::cuda

#include "core/optim/sgd.h"
#include "cuda/optim/step.cuh"

namespace pycomm::cuda {

template void launch_step<Sgd<false>>(const StepLaunch&, std::int64_t, cudaStream_t);
template void launch_step<Sgd<true>>(const StepLaunch&, std::int64_t, cudaStream_t);

}  // namespace pycomm::cuda

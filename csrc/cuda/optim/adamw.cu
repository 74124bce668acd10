#include "core/optim/adamw.h"
#include "cuda/optim/step.cuh"

namespace pycomm::cuda {

template void launch_step<AdamW<false>>(const StepLaunch&, std::int64_t, cudaStream_t);

}  // namespace pycomm::cuda

#include "cuda/optim/sharded_step.cuh"

namespace pycomm::cuda {

template void launch_sharded_step<AdamWRule>(const ShardedLaunch&, cudaStream_t);

}  // namespace pycomm::cuda

// Reduce-scatter and all-gather, the halves of two-shot.
#include "cuda/launch.cuh"

namespace pycomm::cuda {

template void launch_plain<ReduceScatter>(const Launch&, cudaStream_t);
template void launch_plain<AllGather>(const Launch&, cudaStream_t);

}  // namespace pycomm::cuda

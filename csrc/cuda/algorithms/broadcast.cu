#include "cuda/launch.cuh"

namespace pycomm::cuda {

template void launch_plain<Broadcast>(const Launch&, cudaStream_t);
template void launch_plain<Barrier>(const Launch&, cudaStream_t);

}  // namespace pycomm::cuda

#include "cuda/launch.cuh"

namespace pycomm::cuda {

template void launch_plain<Reduce>(const Launch&, cudaStream_t);

}  // namespace pycomm::cuda

#include "cuda/launch.cuh"

namespace pycomm::cuda {

template void launch_plain<Scatter>(const Launch&, cudaStream_t);

}  // namespace pycomm::cuda

#include "cuda/launch.cuh"
#include "extending/table.h"

namespace pycomm::cuda {

template void launch_plain<Star>(const Launch&, cudaStream_t);

}  // namespace pycomm::cuda

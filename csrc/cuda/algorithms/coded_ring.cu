#include "cuda/codecs/coded_launch.cuh"

namespace pycomm::cuda {

template void launch_coded<Ring>(const CodedLaunch&, cudaStream_t);

}  // namespace pycomm::cuda

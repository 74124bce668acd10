#include "cuda/codecs/coded_launch.cuh"

namespace pycomm::cuda {

template void launch_coded<TwoShot>(const CodedLaunch&, cudaStream_t);

}  // namespace pycomm::cuda

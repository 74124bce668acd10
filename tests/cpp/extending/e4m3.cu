// The library's kernels look codecs up in its own table; these do in the one with e4m3.
#include "cuda/codecs/coded_launch.cuh"
#include "extending/table.h"

namespace pycomm::cuda {

template void launch_coded<TwoShot, CodecsAndE4m3>(const CodedLaunch&, cudaStream_t);
template void launch_coded<Ring, CodecsAndE4m3>(const CodedLaunch&, cudaStream_t);
template void launch_coded<Tree, CodecsAndE4m3>(const CodedLaunch&, cudaStream_t);

}  // namespace pycomm::cuda

// The library's kernels look codecs up in the library's table; these kernels use the table with
// e4m3.
#include "cuda/codecs/coded_launch.cuh"
#include "extending/table.h"

namespace pycomm::cuda {

template void launch_coded<TwoShot, CodecsAndE4m3>(const CodedLaunch&, cudaStream_t);
template void launch_coded<Ring, CodecsAndE4m3>(const CodedLaunch&, cudaStream_t);
template void launch_coded<Tree, CodecsAndE4m3>(const CodedLaunch&, cudaStream_t);

}  // namespace pycomm::cuda

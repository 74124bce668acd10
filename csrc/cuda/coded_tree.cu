#include "cuda/bodies.cuh"
#include "cuda/coded_launch.cuh"

namespace pycomm::cuda {

void launch_coded_tree(const CodedLaunch& launch, cudaStream_t stream) {
  launch_coded<Tree>(launch, stream);
}

}  // namespace pycomm::cuda

#include "cuda/bodies.cuh"
#include "cuda/launch.cuh"

namespace pycomm::cuda {

void launch_tree(const Launch& launch, cudaStream_t stream) {
  launch_reducing<Tree>(launch, stream);
}

}  // namespace pycomm::cuda

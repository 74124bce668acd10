#include "cuda/bodies.cuh"
#include "cuda/launch.cuh"

namespace pycomm::cuda {

void launch_ring(const Launch& launch, cudaStream_t stream) {
  launch_reducing<Ring>(launch, stream);
}

}  // namespace pycomm::cuda

#include "core/ring.h"

#include "cuda/launch.cuh"

namespace pycomm::cuda {
namespace {

struct Ring {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    ring(comm);
  }
};

}  // namespace

void launch_ring(const Launch& launch, cudaStream_t stream) {
  launch_reducing<Ring>(launch, stream);
}

}  // namespace pycomm::cuda

#include "core/two_shot.h"

#include "cuda/launch.cuh"

namespace pycomm::cuda {
namespace {

struct TwoShot {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    two_shot(comm);
  }
};

}  // namespace

void launch_two_shot(const Launch& launch, cudaStream_t stream) {
  launch_reducing<TwoShot>(launch, stream);
}

}  // namespace pycomm::cuda

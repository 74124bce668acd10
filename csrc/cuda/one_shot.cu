#include "core/one_shot.h"

#include "cuda/launch.cuh"

namespace pycomm::cuda {
namespace {

struct OneShot {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    one_shot(comm);
  }
};

}  // namespace

void launch_one_shot(const Launch& launch, cudaStream_t stream) {
  launch_reducing<OneShot>(launch, stream);
}

}  // namespace pycomm::cuda

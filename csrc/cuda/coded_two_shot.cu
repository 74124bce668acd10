#include "core/two_shot.h"

#include "cuda/coded_launch.cuh"

namespace pycomm::cuda {
namespace {

struct TwoShot {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    two_shot(comm, comm.chunks());
  }
};

}  // namespace

void launch_coded_two_shot(const CodedLaunch& launch, cudaStream_t stream) {
  launch_coded<TwoShot>(launch, stream);
}

}  // namespace pycomm::cuda

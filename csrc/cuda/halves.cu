// Reduce-scatter and all-gather, the halves of two-shot.
#include "core/two_shot.h"
#include "cuda/launch.cuh"

namespace pycomm::cuda {
namespace {

struct ReduceScatter {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    reduce_scatter(comm);
  }
};

struct AllGather {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    all_gather(comm);
  }
};

}  // namespace

void launch_reduce_scatter(const Launch& launch, cudaStream_t stream) {
  launch_reducing<ReduceScatter>(launch, stream);
}

void launch_all_gather(const Launch& launch, cudaStream_t stream) {
  launch_moving<AllGather>(launch, stream);
}

}  // namespace pycomm::cuda

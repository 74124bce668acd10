#include "core/broadcast.h"

#include "cuda/launch.cuh"

namespace pycomm::cuda {
namespace {

struct Broadcast {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    broadcast(comm);
  }
};

struct Barrier {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    barrier(comm);
  }
};

}  // namespace

void launch_broadcast(const Launch& launch, cudaStream_t stream) {
  launch_moving<Broadcast>(launch, stream);
}

void launch_barrier(const Launch& launch, cudaStream_t stream) {
  launch_moving<Barrier>(launch, stream);
}

}  // namespace pycomm::cuda

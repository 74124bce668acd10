#include "core/tree.h"

#include "cuda/launch.cuh"

namespace pycomm::cuda {
namespace {

struct Tree {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    tree(comm);
  }
};

}  // namespace

void launch_tree(const Launch& launch, cudaStream_t stream) {
  launch_reducing<Tree>(launch, stream);
}

}  // namespace pycomm::cuda

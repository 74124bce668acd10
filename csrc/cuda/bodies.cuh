// What kernels run of core/, with a codec and without.
#pragma once

#include "core/ring.h"
#include "core/tree.h"

namespace pycomm::cuda {

struct Ring {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    ring(comm);
  }
};

struct Tree {
  template <class Comm>
  __device__ static void run(Comm& comm) {
    tree(comm);
  }
};

}  // namespace pycomm::cuda

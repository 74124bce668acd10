// How an algorithm becomes kernels with a codec: one per element type; the codec is an argument of
// the kernel.
#pragma once

#include "cuda/codecs/coded_comm.cuh"
#include "cuda/launch.cuh"

namespace pycomm::cuda {

// Ring and tree have no registers left.
template <class Body>
inline constexpr bool kTakesRuns = std::is_same_v<Body, TwoShot>;

template <class Body, class T, class Codecs>
__global__ void __launch_bounds__(kThreads, 1)
    coded_kernel(const __grid_constant__ CodedLaunch launch) {
  for (int part = 0; part < launch.parts; ++part) {
    const PartRow& row = fetch(launch, static_cast<int>(blockIdx.x) / launch.lanes, part);
    BlockComm<T> comm(launch, row, kLargestBlock);
    CodedComm<T, Codecs, kTakesRuns<Body>> coded(comm, row, launch.staging);
    Body::run(coded);
    coded.finish();
    comm.finish(part + 1 == launch.parts);
  }
}

// Calls visit(T{}) with the element type of a tensor that can be compressed.
template <class Visit>
void visit_compressible(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::f16:
      return visit(Half{});
    case DType::bf16:
      return visit(BFloat16{});
    default:
      return visit(float{});
  }
}

template <class Body, class Codecs>
void launch_coded(const CodedLaunch& launch, cudaStream_t stream) {
  visit_compressible(launch.ranks[0].operation.dtype, [&](auto element) {
    launch_meeting<&coded_kernel<Body, decltype(element), Codecs>>(launch, stream);
  });
}

}  // namespace pycomm::cuda

// Makes kernels of one body of core/algorithms/run.h: for each element type one per frequent reduction
// and one for all others, or a single one if the body only moves elements.
#pragma once

#include "core/algorithms/run.h"
#include "cuda/comm.cuh"
#include "cuda/launch.h"
#include "cuda/packets.cuh"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

// What runs a body.
template <class Body, class T, class Reducer>
struct ExecutorOf {
  using type = BlockComm<T, Reducer>;
};

template <class Body, class T, class Reducer = Known<ReduceOp::sum>>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Launch launch) {
  typename ExecutorOf<Body, T, Reducer>::type comm(launch);
  Body::run(comm);
  comm.finish();
}

// Launches blocks that wait for each other inside the kernel, so that they must be resident together. A
// cooperative launch guarantees that, or fails.
template <auto kernel, class L>
void launch_resident(const L& launch, cudaStream_t stream, int threads = kThreads) {
  static_assert(takes<kernel, L>);
  const std::int64_t blocks = std::int64_t{launch.local_ranks} * launch.lanes;
  void* arguments[] = {const_cast<L*>(&launch)};
  PYCOMM_CUDA_CHECK(
      cudaLaunchCooperativeKernel(kKernel<kernel>, dim3(static_cast<unsigned>(blocks)),
                                  dim3(static_cast<unsigned>(threads)), arguments, 0, stream));
}

// Launches blocks that wait only for blocks of other ranks.
template <auto kernel, class L>
void launch_meeting(const L& launch, cudaStream_t stream, int threads = kThreads) {
  if (launch.local_ranks > 1) return launch_resident<kernel>(launch, stream, threads);
  launch_blocks<kernel>(launch.lanes, launch, stream, threads);
}

// The element type and the reduction of a kernel.
template <class T, class Reducer>
struct Reduces {
  using Element = T;
  using Reduction = Reducer;
};

// Calls visit(Reduces<T, Reducer>{}) with those of the kernel that reduces for an operation.
template <class Visit>
void visit_reducer(const Operation& operation, Visit visit) {
  visit_dtype(operation.dtype, [&](auto element) {
    using T = decltype(element);
    if (operation.op == ReduceOp::sum) {
      return visit(Reduces<reduced_type_t<T, ReduceOp::sum>, Known<ReduceOp::sum>>{});
    }
    if constexpr (std::is_floating_point_v<accumulator_t<T>>) {
      if (operation.op == ReduceOp::avg) return visit(Reduces<T, Known<ReduceOp::avg>>{});
    }
    visit(Reduces<T, LookedUp>{});
  });
}

template <class Body>
void launch_plain(const Launch& launch, cudaStream_t stream) {
  if constexpr (requires { Body::kMovesOnly; }) {
    launch_meeting<&kernel<Body, std::byte>>(launch, stream);
  } else {
    const Operation& operation = launch.ranks[0].operation;
    visit_reducer(operation, [&](auto with) {
      using T = typename decltype(with)::Element;
      using Reducer = typename decltype(with)::Reduction;
      if constexpr (std::is_same_v<Body, OneShot>) {
        constexpr auto* kPackets = &packets_kernel<T, Reducer>;
        if (fits_packets(operation)) return launch_meeting<kPackets>(launch, stream);
      }
      launch_meeting<&kernel<Body, T, Reducer>>(launch, stream);
    });
  }
}

}  // namespace pycomm::cuda

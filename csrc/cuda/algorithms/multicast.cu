#include "cuda/multicast.cuh"

namespace pycomm::cuda {
namespace {

template <class T>
void launch_for(const Launch& launch, cudaStream_t stream) {
  if (launch.ranks[0].operation.op == ReduceOp::sum) {
    launch_meeting<&kernel<Multicast, T, Known<ReduceOp::sum>>>(launch, stream);
  } else {
    launch_meeting<&kernel<Multicast, T, Known<ReduceOp::avg>>>(launch, stream);
  }
}

}  // namespace

// A group refuses operations of other types and reductions (adds_in_switch()).
template <>
void launch_plain<Multicast>(const Launch& launch, cudaStream_t stream) {
  switch (launch.ranks[0].operation.dtype) {
    case DType::f32:
      return launch_for<float>(launch, stream);
    case DType::f16:
      return launch_for<Half>(launch, stream);
    default:
      return launch_for<BFloat16>(launch, stream);
  }
}

}  // namespace pycomm::cuda

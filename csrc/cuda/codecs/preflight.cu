// What a rank knows of its tensor. With feedback, the announcement must tell whether it may be summed,
// and whether it is used, so that is found in a kernel before.
#include "cuda/codecs/coded_launch.cuh"

namespace pycomm::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    preflight_kernel(const __grid_constant__ CodedLaunch launch) {
  const int lanes = launch.layout.lanes;
  const int lane = static_cast<int>(blockIdx.x) % lanes;
  const RankLaunch& me = launch.ranks[blockIdx.x / lanes];
  const T* const x = reinterpret_cast<const T*>(me.input);
  const Feedback& feedback = launch.compressions[blockIdx.x / lanes].feedback;
  const float scale = scaling_of(feedback).scale;
  std::uint32_t largest = 0;
  bool used = false;
  for (std::int64_t start = lane * kBlockElements + threadIdx.x * kOctet;
       start < me.operation.count; start += lanes * kBlockElements) {
    const int n = octet_count(me.operation.count - start);
    const Octet<T> octet = load_octet(x + start, n);
    const Octet<float> kept = load_octet(feedback.residual + start, n);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float value = load(octet.element[i]);
      largest = max(largest, magnitude(contribution(value, kept.element[i], scale)));
      used |= magnitude(value) != 0;
    }
  }
  put_preflight(launch, largest, used);
}

}  // namespace

void launch_preflight(const CodedLaunch& launch, cudaStream_t stream) {
  visit_compressible(launch.ranks[0].operation.dtype, [&](auto element) {
    launch_blocks<&preflight_kernel<decltype(element)>>(launch.local_ranks * launch.layout.lanes,
                                                        launch, stream);
  });
}

}  // namespace pycomm::cuda

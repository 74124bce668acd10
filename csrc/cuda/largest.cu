// The largest magnitudes of what a rank contributes. With feedback, the announcement must tell
// whether they are too large to be summed, so they are found in a kernel before.
#include "cuda/coded_launch.cuh"

namespace pycomm::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ CodedLaunch launch) {
  const int lanes = launch.layout.lanes;
  const int lane = static_cast<int>(blockIdx.x) % lanes;
  const RankLaunch& me = launch.ranks[blockIdx.x / lanes];
  const T* const x = reinterpret_cast<const T*>(me.input);
  const float* const residual = launch.compressions[blockIdx.x / lanes].feedback.residual;
  std::uint32_t largest = 0;
  for (std::int64_t start = lane * kStride + threadIdx.x * kOctet; start < me.operation.count;
       start += lanes * kStride) {
    const int n = octet_count(me.operation.count - start);
    const Octet<T> octet = load_octet(x + start, n);
    const Octet<float> kept = load_octet(residual + start, n);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      largest = max(largest, magnitude(contribution(load(octet.element[i]), kept.element[i])));
    }
  }
  largest = largest_of(largest, kThreads);
  if (threadIdx.x == 0) launch.largest[blockIdx.x / lanes][lane] = largest;
}

}  // namespace

void launch_largest(const CodedLaunch& launch, cudaStream_t stream) {
  visit_compressible(launch.ranks[0].operation.dtype, [&](auto element) {
    launch_blocks(&largest_kernel<decltype(element)>, launch.local_ranks * launch.layout.lanes,
                  launch, stream);
  });
}

}  // namespace pycomm::cuda

// The CUDA executor of the sharded average (core/algorithms/sharded_average.h).
#include "core/algorithms/sharded_average.h"

#include "cuda/optim/sharded_comm.cuh"

namespace pycomm::cuda {
namespace {

class ShardedAverageComm : public ShardedComm {
 public:
  __device__ explicit ShardedAverageComm(const ShardedLaunch& launch)
      : ShardedComm(launch), table_{launch.tables[blockIdx.x / launch.lanes]} {}

  __device__ void average() {
    if (comm_.failed()) return;
    const AverageRow* const rows = table_.gradients();
    for_chunks(rows, table_.header().gradients,
               [&](std::int64_t row, std::int64_t first, std::int64_t last) {
                 const OwnGradient gradient = rows[row].gradient;
                 switch (static_cast<DType>(gradient.dtype)) {
                   case DType::f64:
                     return average<double>(gradient, first, last);
                   case DType::f32:
                     return average<float>(gradient, first, last);
                   case DType::f16:
                     return average<Half>(gradient, first, last);
                   default:
                     return average<BFloat16>(gradient, first, last);
                 }
               });
  }
  __device__ void finish() { comm_.finish(); }

 private:
  // Chunks [first, last). A sum with an average that is there is rounded to T, as backward does when it
  // adds a gradient to one that is there.
  template <class T>
  __device__ void average(const OwnGradient& gradient, std::int64_t first,
                          std::int64_t last) const {
    using A = accumulator_t<T>;
    const bool adds = gradient.adds != 0;
    for_runs(first, last, gradient.count, [&](std::int64_t at, int left) {
      T* const to = reinterpret_cast<T*>(gradient.to) + at;
      Eight<T> made{};
      if (adds) made = load_some<InQuads>(to, left);
      A sum[kEight];
      for (int r = 0; r < size(); ++r) {
        const Eight<T> theirs =
            load_some<InQuads>(there(r, reinterpret_cast<const T*>(gradient.from)) + at, left);
#pragma unroll
        for (int i = 0; i < kEight; ++i) {
          const A own = load(theirs[i]), next = adds ? load(store<T>(load(made[i]) + own)) : own;
          sum[i] = r == 0 ? next : combine<ReduceOp::avg>(sum[i], next);
        }
      }
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        made[i] = store<T>(pycomm::finish<ReduceOp::avg>(sum[i], size()));
      }
      store_some(to, left, made);
    });
  }

  const AverageTable table_;
};

__global__ void __launch_bounds__(kShardThreads, 1)
    sharded_average_kernel(const __grid_constant__ ShardedLaunch launch) {
  static_assert(AverageExecutor<ShardedAverageComm>);
  ShardedAverageComm comm(launch);
  sharded_average(comm);
  comm.finish();
}

}  // namespace

void launch_sharded_average(const ShardedLaunch& launch, cudaStream_t stream) {
  launch_meeting<&sharded_average_kernel>(launch, stream, kShardThreads);
}

}  // namespace pycomm::cuda

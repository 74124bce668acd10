// The executor of core/algorithms/multicast.h: a BlockComm that reaches all windows through the switch.
#pragma once

#include "cuda/comm.cuh"
#include "cuda/launch.cuh"
#include "cuda/multimem.cuh"

namespace pycomm::cuda {

// T: float, Half or BFloat16.
template <class T, class Reducer>
class MulticastComm : public BlockComm<T, Reducer> {
 public:
  using Base = BlockComm<T, Reducer>;
  using Base::Base, Base::rank, Base::size, Base::at;

  // Uses tensors in place if all lie at the same aligned place of one region: the switch knows no other.
  __device__ void announce() {
    Base::publish();
    Base::await_announcements();
    if (this->zero_copy_) {
      const Announcement& mine = Base::announced(rank());
      const RegionTable in = this->me_.input_region, out = this->me_.output_region;
      bool apart = (mine.input | mine.output) % sizeof(uint4) != 0 || all_of(in) == nullptr ||
                   all_of(out) == nullptr;
      for (int r = threadIdx.x; r < size(); r += blockDim.x) {
        const Announcement& other = Base::announced(r);
        apart |= other.input - address(in[r]) != mine.input - address(in[rank()]) ||
                 other.output - address(out[r]) != mine.output - address(out[rank()]);
      }
      this->zero_copy_ = __syncthreads_or(apart) == 0;
    }
    Base::enter_heaps();
  }

  template <class To, class From>
  __device__ void reduce_in_switch(To to, From from, std::int64_t n) {
    if (this->failed_) return;
    const RegionTable windows = this->me_.windows;
    auto* const target =
        everywhere(to(rank()), this->zero_copy_ ? this->me_.output_region : windows);
    const auto* const source =
        everywhere(from(rank()), this->zero_copy_ ? this->me_.input_region : windows);
    const std::int64_t packs = n / kPerPack, stride = blockDim.x;
    fence_aliases();
    std::int64_t i = threadIdx.x;
    // Several sums are under way at once, because each takes a trip to the switch.
    for (; i + (kDepth - 1) * stride < packs; i += kDepth * stride) {
      uint4 sum[kDepth];
#pragma unroll
      for (int k = 0; k < kDepth; ++k) sum[k] = multimem_sum<T>(source + i + k * stride);
#pragma unroll
      for (int k = 0; k < kDepth; ++k) multimem_store(target + i + k * stride, finished(sum[k]));
    }
    for (; i < packs; i += stride)
      multimem_store(target + i, finished(multimem_sum<T>(source + i)));
    fence_aliases();
    // No instruction takes less than 16 bytes of a tensor's end without its neighbours.
    const std::int64_t done = packs * kPerPack;
    if (done == n) return;
    Base::reduce(
        size(), [&](int r) { return at(to(r), done); }, size(),
        [&](int r) { return at(from(r), done); }, n - done, true);
  }

 private:
  static constexpr int kDepth = 4;
  static constexpr int kPerPack = sizeof(uint4) / sizeof(T);
  struct alignas(uint4) Pack {
    T element[kPerPack];
  };

  static __device__ std::int64_t address(const std::byte* data) {
    return reinterpret_cast<std::int64_t>(data);
  }

  // Where the switch reaches a region of all ranks.
  __device__ std::byte* all_of(RegionTable region) const { return region[2 * size()]; }

  // The place of a location of this rank, in the region of all ranks.
  __device__ uint4* everywhere(Location location, RegionTable region) const {
    return reinterpret_cast<uint4*>(all_of(region) + (location.data - region[rank()]));
  }

  __device__ uint4 finished(uint4 sum) const {
    Pack pack = bit_cast<Pack>(sum);
#pragma unroll
    for (T& element : pack.element) {
      element =
          store<T>(Reducer::template finished<T>(this->me_.operation.op, load(element), size()));
    }
    return bit_cast<uint4>(pack);
  }
};

static_assert(MulticastExecutor<MulticastComm<float, Known<ReduceOp::sum>>>);

template <class T, class Reducer>
struct ExecutorOf<Multicast, T, Reducer> {
  using type = MulticastComm<T, Reducer>;
};

}  // namespace pycomm::cuda

// The CUDA executor of a small all-reduce in packets (core/algorithms/packet.h). What other executors do
// one step after the other, a block does at once, so that an operation takes three trips to memory: the
// loads it begins with, the packets' way to the other ranks, and the load that finds theirs.
//
//   - Packets carry the operation, too, before the tensor, so ranks need not wait for announcements to
//     compare operations. A warp of its own publishes each announcement all the same: a rank that runs
//     another operation finds it. If packets do not come soon, or are of another operation, a block waits
//     for announcements as in any other operation, compares and reports, and only then goes on.
//   - A thread has what all ranks have sent of an item in registers, and adds it up in rank order.
//   - Announcements also order operations: once rank r has announced operation k + 1, it no longer uses
//     what it has read or cleared in operation k. Here the packets of the operation do that. Their sender
//     passes a fence before them, beside its first loads; their receiver passes one at the end.
//   - The host's abort word is loaded at the beginning. An abort that comes later may be missed, because
//     nothing that is used here belongs to another rank: packets lie in windows, which outlive all
//     kernels, and hold what was sent before anything failed.
#pragma once

#include "core/algorithms/packet.h"
#include "cuda/comm.cuh"

namespace pycomm::cuda {

template <class T, class Reducer>
class PacketComm : BlockComm<T, Reducer> {
  using Base = BlockComm<T, Reducer>;
  using Base::await_announcements, Base::begin_, Base::conclude, Base::count_, Base::failed_,
      Base::get_ready, Base::lane_, Base::layout_, Base::me_, Base::pass_on, Base::poll,
      Base::publish, Base::rank, Base::sequence_, Base::size, Base::tells, Base::vote_to_stop;

 public:
  __device__ explicit PacketComm(const Launch& launch)
      : Base(launch, launch.ranks[blockIdx.x / launch.lanes], kLine / sizeof(T),
             typename Base::Unready{}),
        chunks_(static_cast<int>(ceil_div(count_ * kSize, sizeof(Words)))),
        items_(chunks_ + (lane_ == 0 ? kOperationItems : 0)) {
    // None of these waits for another one.
    own_ = own(threadIdx.x);
    if (concludes()) {
      abort_ = abort_word_of(me_, lane_).load(::cuda::std::memory_order_relaxed);
    }
    if (speaks()) __threadfence_system();  // releases, with the packets of the operation
    const int r = static_cast<int>(threadIdx.x);
    if (r < size()) windows()[r] = me_.windows[r];
    get_ready();
  }

  // The last warp publishes, the others work on items.
  __device__ void all_reduce() {
    if (failed_) return;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= workers()) publish(threadIdx.x - workers(), kWarp);
    for (int first = 0; first < items_ && !failed_; first += workers()) {
      const bool works = thread < workers() && first + thread < items_;
      exchange(works ? first + thread : kNone);
      own_ = own(first + workers() + thread);
    }
  }

  __device__ void finish() {
    if (failed_ || patient_) return Base::finish();
    if (speaks()) __threadfence_system();  // acquires what the packets of the operation release
    pass_on();
    if (concludes()) conclude(is_aborted(me_, abort_), true, 0);
  }

 private:
  using A = accumulator_t<T>;
  static constexpr int kWarp = 32;
  static constexpr int kNone = -1;
  static constexpr int kSize = sizeof(T);
  static constexpr int kSpins = 64;  // until a block becomes patient
  static constexpr int kAtOnce = 4;  // ranks whose packets are loaded before the first is tested

  // What a thread works on at once: of the tensor, or of the operation. A packet has one word of it.
  static constexpr int kWords = kSize <= 4 ? 1 : kSize / 4;
  struct Words {
    std::uint32_t word[kWords];
  };
  static constexpr int kElements = sizeof(Words) / kSize;
  struct Elements {
    T element[kElements];
  };
  static constexpr int kOperationItems = sizeof(Operation) / sizeof(Words);
  static_assert(sizeof(Operation) % sizeof(Words) == 0);

  __device__ static std::byte** windows() {
    __shared__ std::byte* windows[kMaxRanks];
    return windows;
  }

  __device__ int workers() const { return static_cast<int>(blockDim.x) - kWarp; }
  __device__ bool is_operation(int item) const { return item >= chunks_; }
  // True for the thread that sends and receives the operation's first item.
  __device__ bool speaks() const {
    return lane_ == 0 && static_cast<int>(threadIdx.x) == chunks_ % workers();
  }

  // True for a thread that has no item unless a tensor is of the largest. So nothing waits for the host.
  __device__ bool concludes() const { return static_cast<int>(threadIdx.x) == workers() - 1; }

  // This rank's words of an item, padded with zeros beyond the end of the tensor.
  __device__ Words own(int item) const {
    Words words{};
    if (item >= items_) return words;
    if (is_operation(item)) {
      const auto* const all = reinterpret_cast<const std::byte*>(&me_.operation);
      __builtin_memcpy(&words, all + (item - chunks_) * sizeof(Words), sizeof(Words));
      return words;
    }
    Elements elements{};
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const std::int64_t i = std::int64_t{item} * kElements + e;
      if (i < count_) elements.element[e] = reinterpret_cast<const T*>(me_.input)[begin_ + i];
    }
    return bit_cast<Words>(elements);
  }

  // Calls visit(place, w) with the packets of an item that rank `from` puts into a window.
  template <class Visit>
  __device__ void each_packet(std::byte* window, int from, int item, Visit visit) const {
    auto* first = reinterpret_cast<std::uint64_t*>(window + layout_.packets(sequence_, from));
    first += is_operation(item) ? (item - chunks_) * kWords
                                : sizeof(Operation) / 4 + begin_ * kSize / 4 + item * kWords;
#pragma unroll
    for (int w = 0; w < kWords; ++w) visit(shared_word<std::uint64_t>(first + w), w);
  }
  // Of all other ranks, from the next one on.
  template <class Visit>
  __device__ void each_other(Visit visit) const {
    for (int r = after(rank()); r != rank(); r = after(r)) visit(r);
  }
  __device__ int after(int r) const { return r + 1 == size() ? 0 : r + 1; }

  // All threads of the block work on an item each, or on none.
  __device__ void exchange(int item) {
    if (item != kNone) put(item);
    const bool found = item == kNone || find(item);
    if (__syncthreads_or(!found) != 0) {
      if (!patient_) await_announcements();
      patient_ = true;
      vote_to_stop(item != kNone && !(wait_for(item) && find(item)));
      if (failed_) return;
    }
    if (concludes() && tells(0)) note_arrival();
    if (item == kNone) return;
    if (!is_operation(item)) store(item);
    clear(item);
  }

  __device__ void put(int item) const {
    each_other([&](int r) {
      each_packet(windows()[r], rank(), item, [&](auto place, int w) {
        place.store(make_packet(own_.word[w], sequence_), ::cuda::std::memory_order_relaxed);
      });
    });
  }

  // Takes all ranks' words of an item, if they come soon: adds them up, or compares the operation's.
  __device__ bool find(int item) {
    bool same = true;
    for (int first = 0; first < size(); first += kAtOnce) {
      Words words[kAtOnce];
      if (!load(item, first, words)) return false;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k >= size()) break;
        if (is_operation(item)) {
          same = same && is_same(words[k]);
        } else {
          add(bit_cast<Elements>(words[k]), first + k == 0);
        }
      }
    }
    return same || patient_;  // who is patient has compared announcements
  }

  // Those of kAtOnce ranks. The loads do not wait for each other.
  __device__ bool load(int item, int first, Words (&words)[kAtOnce]) const {
    for (int spin = 0; spin < kSpins; ++spin) {
      std::uint64_t found[kAtOnce][kWords];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int r = first + k;
#pragma unroll
        for (int w = 0; w < kWords; ++w) found[k][w] = make_packet(own_.word[w], sequence_);
        if (r == rank() || r >= size()) continue;
        each_packet(me_.window, r, item, [&](auto place, int w) {
          found[k][w] = place.load(::cuda::std::memory_order_relaxed);
        });
      }
      bool come = true;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          come = come && packet_sequence(found[k][w]) == sequence_;
          words[k].word[w] = packet_data(found[k][w]);
        }
      }
      if (come) return true;
    }
    return false;
  }

  // As long as it takes. Returns false if the wait cannot be satisfied.
  __device__ bool wait_for(int item) {
    bool come = true;
    each_other([&](int r) {
      each_packet(me_.window, r, item, [&](auto place, int) {
        const auto has_come = [&] {
          return packet_sequence(place.load(::cuda::std::memory_order_relaxed)) == sequence_;
        };
        come = come && poll(has_come, r);
      });
    });
    return come;
  }

  __device__ void clear(int item) const {
    each_other([&](int r) {
      each_packet(me_.window, r, item, [&](auto place, int) {
        place.store(make_packet(0, ~sequence_ & 1u), ::cuda::std::memory_order_relaxed);
      });
    });
  }

  __device__ bool is_same(const Words& other) const {
    bool same = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) same = same && other.word[w] == own_.word[w];
    return same;
  }

  __device__ void add(const Elements& next, bool first) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const A value = pycomm::load(next.element[e]);
      sum_[e] = first ? value : Reducer::template combined<T>(me_.operation.op, sum_[e], value);
    }
  }

  __device__ void store(int item) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const std::int64_t i = std::int64_t{item} * kElements + e;
      const A value = Reducer::template finished<T>(me_.operation.op, sum_[e], size());
      if (i < count_) reinterpret_cast<T*>(me_.output)[begin_ + i] = pycomm::store<T>(value);
    }
  }

  const int chunks_;  // of this lane's part of the tensor
  const int items_;   // chunks, then the operation's if this is the first lane
  Words own_;
  A sum_[kElements];
  std::uint64_t abort_ = 0;
  bool patient_ = false;
};

template <class T, class Reducer>
__global__ void __launch_bounds__(kThreads, 1)
    packets_kernel(const __grid_constant__ Launch launch) {
  PacketComm<T, Reducer> comm(launch);
  comm.all_reduce();
  comm.finish();
}

}  // namespace pycomm::cuda

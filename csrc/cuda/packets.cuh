// The CUDA executor of a small all-reduce in packets (core/algorithms/packet.h). What other executors do
// one step after the other, a block does at once, so that an operation takes four trips to memory: the
// loads it begins with, the packets' way to the other ranks, the load that finds theirs, and a release.
//
//   - Packets carry the operation, before the tensor, so ranks need not wait for announcements to compare
//     operations: a block votes, and stores nothing of a sum before that. A rank of another operation
//     waits for announcements all the same, so a block publishes its own after the vote. If packets do
//     not come soon, or are of another operation, it then waits for announcements, too, compares and
//     reports, and only then goes on.
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

// The only lane. Its first warp tells the host, the last one publishes, and each thread between them has an
// item: eight bytes of the operation or, after these, of the tensor.
template <class T, class Reducer>
class PacketComm : BlockComm<T, Reducer> {
  using Base = BlockComm<T, Reducer>;
  using Base::await_announcements, Base::conclude, Base::count_, Base::failed_, Base::get_ready,
      Base::layout_, Base::me_, Base::pass_on, Base::poll, Base::rank, Base::report,
      Base::sequence_, Base::size, Base::state_of, Base::tells, Base::vote_to_stop,
      Base::write_announcements;

 public:
  __device__ explicit PacketComm(const Launch& launch)
      : Base(launch, launch.ranks[blockIdx.x], kLine / sizeof(T), typename Base::Unready{}) {
    // None of these waits for another one.
    own_ = own();
    if (threadIdx.x == 0) {
      const auto word = shared_word<std::uint64_t>(&me_.mailbox->lanes[0].abort);
      abort_ = word.load(::cuda::std::memory_order_relaxed);
    }
    if (item_ == 0) __threadfence_system();  // releases, with the operation's first packets
    const int r = static_cast<int>(threadIdx.x);
    if (r < size()) windows()[r] = me_.windows[r];
    get_ready();
  }

  __device__ void all_reduce() {
    if (failed_) return;
    if (tells()) tell_begin(me_, state_of(0));
    if (has_item()) put();
    const bool found = !has_item() || find();
    patient_ = __syncthreads_or(!found) != 0;
    const unsigned first = blockDim.x - kWarp;
    if (threadIdx.x >= first) write_announcements(windows(), threadIdx.x - first, kWarp);
    if (patient_) {
      __syncthreads();  // this rank's announcement lies in its own window, too
      await_announcements();
      vote_to_stop(has_item() && !(wait() && find()));
      if (failed_) return;
    }
    if (tells()) note_arrival();
    if (!has_item()) return;
    if (!is_operation()) store();
    clear();
  }

  __device__ void finish() {
    if (failed_ || patient_) return Base::finish();
    if (item_ == 0) __threadfence_system();  // acquires what the operation's first packets release
    pass_on();
    if (threadIdx.x != 0) return;
    conclude(abort_ != 0 && !report(Reason::aborted, rank()), true);
  }

 private:
  using A = accumulator_t<T>;
  static constexpr int kWarp = 32;
  static constexpr int kSize = sizeof(T);
  static constexpr int kSpins = 1024;  // until a block becomes patient
  static constexpr int kAtOnce = 4;    // ranks whose packets are loaded before the first is tested

  // An item travels in two packets.
  static constexpr int kWords = 2;
  struct Words {
    std::uint32_t word[kWords];
  };
  static constexpr int kElements = sizeof(Words) / kSize;
  struct Elements {
    T element[kElements];
  };
  static constexpr int kOperationItems = sizeof(Operation) / sizeof(Words);
  static_assert(sizeof(Operation) % sizeof(Words) == 0);
  static_assert(kWarp + kOperationItems + kPacketBytes / sizeof(Words) + kWarp <= kThreads);

  __device__ static std::byte** windows() {
    __shared__ std::byte* windows[kMaxRanks];
    return windows;
  }

  __device__ bool has_item() const {
    return item_ >= 0 && (item_ - kOperationItems) * kElements < count_;
  }
  __device__ bool is_operation() const { return item_ < kOperationItems; }

  // This rank's words of the item, padded with zeros beyond the end of the tensor.
  __device__ Words own() const {
    Words words{};
    if (!has_item()) return words;
    if (is_operation()) {
      const auto* const all = reinterpret_cast<const std::byte*>(&me_.operation);
      __builtin_memcpy(&words, all + item_ * sizeof(Words), sizeof(Words));
      return words;
    }
    Elements elements{};
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int i = index_of(e);
      if (i < count_) elements.element[e] = reinterpret_cast<const T*>(me_.input)[i];
    }
    return bit_cast<Words>(elements);
  }
  __device__ int index_of(int e) const { return (item_ - kOperationItems) * kElements + e; }

  // Calls visit(place, w) with the packets of the item that rank `from` puts into a window.
  template <class Visit>
  __device__ void each_packet(std::byte* window, int from, Visit visit) const {
    auto* const first = reinterpret_cast<std::uint64_t*>(window + layout_.packets(sequence_, from));
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      visit(shared_word<std::uint64_t>(first + item_ * kWords + w), w);
    }
  }
  // Calls visit(r) for all other ranks, from the next one on.
  template <class Visit>
  __device__ void each_other(Visit visit) const {
    for (int r = after(rank()); r != rank(); r = after(r)) visit(r);
  }
  __device__ int after(int r) const { return r + 1 == size() ? 0 : r + 1; }

  __device__ void put() const {
    each_other([&](int r) {
      each_packet(windows()[r], rank(), [&](auto place, int w) {
        place.store(make_packet(own_.word[w], sequence_), ::cuda::std::memory_order_relaxed);
      });
    });
  }

  // Takes all ranks' words of the item, if they come soon: adds them up, or compares the operation's.
  __device__ bool find() {
    bool same = true;
    for (int first = 0; first < size(); first += kAtOnce) {
      Words words[kAtOnce];
      if (!load(first, words)) return false;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k >= size()) break;
        if (is_operation()) {
          same = same && is_same(words[k]);
        } else {
          add(bit_cast<Elements>(words[k]), first + k == 0);
        }
      }
    }
    return same || patient_;  // who is patient has compared announcements
  }

  // Loads the words of kAtOnce ranks. The loads do not wait for each other.
  __device__ bool load(int first, Words (&words)[kAtOnce]) const {
    for (int spin = 0; spin < kSpins; ++spin) {
      std::uint64_t found[kAtOnce][kWords];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int r = first + k;
#pragma unroll
        for (int w = 0; w < kWords; ++w) found[k][w] = make_packet(own_.word[w], sequence_);
        if (r == rank() || r >= size()) continue;
        each_packet(me_.window, r, [&](auto place, int w) {
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
  __device__ bool wait() {
    bool come = true;
    each_other([&](int r) {
      each_packet(me_.window, r, [&](auto place, int) {
        const auto has_come = [&] {
          return packet_sequence(place.load(::cuda::std::memory_order_relaxed)) == sequence_;
        };
        come = come && poll(has_come, r);
      });
    });
    return come;
  }

  __device__ void clear() const {
    each_other([&](int r) {
      each_packet(me_.window, r, [&](auto place, int) {
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

  __device__ void store() const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const A value = Reducer::template finished<T>(me_.operation.op, sum_[e], size());
      const int i = index_of(e);
      if (i < count_) reinterpret_cast<T*>(me_.output)[i] = pycomm::store<T>(value);
    }
  }

  const int item_ = static_cast<int>(threadIdx.x) - kWarp;
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

// The CUDA executor of the algorithms in core/: one block of threads per rank and lane. Every method
// is called by all threads of the block together.
//
// A wait that cannot be satisfied does not trap, because that would cost the process its context:
// the block drains. From then on its waits return at once, it moves no data and sends no signals.
// The mailbox holds the reason.
#pragma once

#include "core/algorithms/table.h"
#include "core/executor.h"
#include "core/layout.h"
#include "cuda/announcing.cuh"
#include "cuda/elements.cuh"
#include "cuda/layout.h"
#include "cuda/progress.cuh"

namespace pycomm::cuda {

// T is the type of elements that are reduced. For std::byte, the executor only moves the operation's
// elements and counts in bytes. Reducer, Known or LookedUp, matters to reduce() only: executors of codecs
// and of lists reduce by themselves.
template <class T, class Reducer = Known<ReduceOp::sum>>
class BlockComm {
 public:
  static constexpr bool kCoded = false;

  // `me`: the rank that the block works for. Lanes begin at multiples of `unit` elements.
  __device__ BlockComm(const Launch& launch, const RankLaunch& me,
                       std::int64_t unit = kLine / sizeof(T))
      : BlockComm(launch, me, unit, Unready{}) {
    get_ready();
  }

  __device__ explicit BlockComm(const Launch& launch)
      : BlockComm(launch, launch.ranks[blockIdx.x / launch.lanes]) {}

  // Stores the state for the next operation. An operation whose waits were all satisfied still fails
  // if the group was aborted meanwhile: a failed rank may have changed the data that was read. `last`:
  // no other meeting of the launch follows.
  __device__ void finish(bool last = true) {
    if (failed_ && state_of(lane_).failed == 0) withdraw(announcements());
    pass_on();
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();  // looks after the block's last read and write
    conclude(failed_ || aborted(me_, lane_), last);
  }

  __device__ bool failed() const { return failed_; }
  // All threads of the block agree on whether to drain.
  __device__ void vote_to_stop(bool stop) { failed_ = __syncthreads_or(stop) != 0 || failed_; }
  __device__ int rank() const { return me_.rank; }
  __device__ int size() const { return layout_.ranks; }
  __device__ int root() const { return me_.operation.root; }
  __device__ std::int64_t begin() const { return begin_; }  // of this lane's part
  __device__ std::int64_t count() const { return count_; }
  __device__ std::int64_t block() const {
    const Operation& operation = me_.operation;
    return kMovesBytes ? operation.count * size_of(operation.dtype) : operation.count;
  }
  __device__ std::int64_t elements(std::int64_t bytes) const { return bytes / kSize; }
  __device__ std::int64_t line() const { return kLine / kSize; }
  __device__ bool zero_copy() const { return zero_copy_; }
  __device__ Location input() const { return {me_.input + begin_ * kSize, me_.rank}; }
  __device__ Location output() const { return {me_.output + begin_ * kSize, me_.rank}; }
  __device__ Location input(int r) const {
    return {reinterpret_cast<std::byte*>(announced(r).input) + begin_ * kSize, r};
  }
  __device__ Location output(int r) const {
    return {reinterpret_cast<std::byte*>(announced(r).output) + begin_ * kSize, r};
  }
  __device__ Location slot(int r, std::int64_t i) const {
    return {window(r) + layout_.staging(sequence_, lane_, i), r};
  }
  __device__ std::int64_t slot_count() const { return elements(layout_.slot_bytes()); }
  // The own one's address is a parameter; to load it would delay what needs it.
  __device__ std::byte* window(int r) const { return r == me_.rank ? me_.window : me_.windows[r]; }
  __device__ std::uint32_t sequence() const { return sequence_; }
  __device__ int lane() const { return lane_; }
  // All lanes' slots together.
  __device__ std::byte* area(int r) const { return window(r) + layout_.staging(sequence_, 0, 0); }
  __device__ Location at(Location location, std::int64_t elements) const {
    return {location.data + elements * kSize, location.rank};
  }

  __device__ void announce() {
    publish();
    await_announcements();
    enter_heaps();
  }
  // Call before announce(), which publishes it.
  __device__ void set_preflight(Preflight preflight) { preflight_ = preflight; }
  // The combination of all ranks' preflights; valid after announce(). Not inlined: algorithms have no
  // registers left for it.
  __device__ __noinline__ Preflight preflight() const {
    if (failed_) return {};
    Preflight all = announced(0).preflight;
    for (int r = 1; r < size(); ++r) all = all | announced(r).preflight;
    return all;
  }

  __device__ void publish() {
    __syncthreads();
    write_announcements(me_.windows, threadIdx.x, blockDim.x);
    if (tells()) tell_begin(me_, state_of(lane_));  // after the release, which would wait for it
  }

  __device__ void await_announcements() {
    if (failed_) return;
    bool stop = false, staged = !can_be_direct();
    for (int r = threadIdx.x; r < size(); r += blockDim.x) {
      if (!has_announced(r)) {
        stop = true;
        continue;
      }
      // A copy, because a comparison in place would wait for one field after the other.
      const Announcement& line = announced(r);
      const Operation operation = line.operation;
      const std::int64_t input = line.input, output = line.output;
      stop |= !(operation == me_.operation);
      staged |= (input == kNotInWindow && shares_input(me_.operation, r)) ||
                (output == kNotInWindow && shares_output(me_.operation, r));
    }
    zero_copy_ = __syncthreads_or(stop || staged) == 0;
    vote_to_stop(stop);
    // The first lane works for every operation, so it sees each mismatch, and reports it.
    if (failed_ && threadIdx.x == 0 && lane_ == 0) report_mismatch(announcements());
    if (tells()) note_arrival();
  }

  __device__ void signal(int channel) {
    ++signalled_[channel];
    __syncthreads();
    for (int r = threadIdx.x; r < size(); r += blockDim.x) {
      if (r == rank() || failed_) continue;
      shared_word<std::uint32_t>(window(r) + layout_.flag(lane_, channel, rank()))
          .store(signalled_[channel], ::cuda::std::memory_order_release);
    }
  }

  __device__ void wait(int r, int channel, std::int64_t step) {
    if (step <= 0 || r == rank()) return;
    bool stop = false;
    if (threadIdx.x == 0) stop = !poll_signals(channel, r, step);
    vote_to_stop(stop);
  }

  __device__ void wait_all(int channel, std::int64_t step) {
    if (step <= 0) return;
    bool stop = false;
    for (int r = threadIdx.x; r < size(); r += blockDim.x) {
      if (r != rank()) stop |= !poll_signals(channel, r, step);
    }
    vote_to_stop(stop);
  }

  __device__ void copy(Location to, Location from, std::int64_t n) {
    if (failed_ || to.data == from.data) return;
    const std::int64_t bytes = n * kSize;
    std::int64_t done = 0;
    if (aligned(to.data) && aligned(from.data)) {
      done = copy_words<uint4>(to.data, from.data, bytes);
    } else if constexpr (kMovesBytes) {  // the widest words that both addresses allow
      const auto both =
          reinterpret_cast<std::uintptr_t>(to.data) | reinterpret_cast<std::uintptr_t>(from.data);
      done = both % 8 == 0   ? copy_words<std::uint64_t>(to.data, from.data, bytes)
             : both % 4 == 0 ? copy_words<std::uint32_t>(to.data, from.data, bytes)
             : both % 2 == 0 ? copy_words<std::uint16_t>(to.data, from.data, bytes)
                             : 0;
    }
    auto* target = reinterpret_cast<T*>(to.data);
    const auto* source = reinterpret_cast<const T*>(from.data);
    for (std::int64_t i = done / kSize + threadIdx.x; i < n; i += blockDim.x) target[i] = source[i];
    __syncthreads();
  }

  template <class To, class From>
  __device__ void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool last) {
    if (failed_) return;
    __shared__ std::byte* targets[kMaxRanks + 1];
    __shared__ const std::byte* sources[kMaxRanks + 1];
    bool odd = false;
    for (int i = threadIdx.x; i < n_to; i += blockDim.x) {
      targets[i] = to(i).data;
      odd |= !aligned(targets[i]);
    }
    for (int i = threadIdx.x; i < n_from; i += blockDim.x) {
      sources[i] = from(i).data;
      odd |= !aligned(sources[i]);
    }
    const Reduction<T, Reducer> reduction{me_.operation.op, size(), last};
    std::int64_t done = 0;
    if (__syncthreads_or(odd) == 0) {
      reduction.template run<kPerVector>(targets, n_to, sources, n_from, 0, n / kPerVector);
      done = n / kPerVector * kPerVector;
    }
    reduction.template run<1>(targets, n_to, sources, n_from, done, n);
    __syncthreads();
  }

 protected:  // for MulticastComm and PacketComm
  // Loads the state. Until get_ready(), each thread knows for itself alone whether the block has failed.
  struct Unready {};
  __device__ BlockComm(const Launch& launch, const RankLaunch& me, std::int64_t unit, Unready)
      : launch_(launch),
        me_(me),
        layout_(launch.layout),
        timeout_ns_(launch.timeout_ns),
        lane_(static_cast<int>(blockIdx.x) % launch.lanes) {
    const LaneState& state = state_of(lane_);
    failed_ = state.failed != 0;
    sequence_ = next_sequence(state.sequence);
    for (int channel = 0; channel < kChannels; ++channel)
      started_[channel] = signalled_[channel] = state.signalled[channel];
    const Range part = part_of(block(), launch_.lanes, lane_, unit);
    begin_ = part.begin;
    count_ = part.count;
  }

  __device__ void get_ready() {
    bool failed = failed_;
    // The last threads look, because the first ones may have other loads to wait for.
    const int thread = static_cast<int>(blockDim.x - 1 - threadIdx.x);
    for (int idle = launch_.lanes + thread; idle < layout_.lanes; idle += blockDim.x) {
      failed |= state_of(idle).failed != 0;
    }
    // All threads have read the state before conclude() writes it.
    failed_ = __syncthreads_or(failed) != 0;
  }

  // The first thread stores the state for the next operation.
  __device__ void conclude(bool failed, bool last) {
    LaneState& state = state_of(lane_);
    failed_ = failed;
    if (zero_copy_) inside().store(0, ::cuda::std::memory_order_release);
    state.failed = failed_;
    state.sequence = sequence_;
    for (int channel = 0; channel < kChannels; ++channel)
      state.signalled[channel] = signalled_[channel];
    if (tells()) tell_end(me_, state, last);
  }

  // Writes the announcement into all windows. `thread`: the number of this one among `threads` that do so.
  __device__ void write_announcements(std::byte* const* windows, unsigned thread,
                                      unsigned threads) {
    for (int r = static_cast<int>(thread); r < size(); r += threads) {
      if (failed_) continue;
      Announcement& line = *reinterpret_cast<Announcement*>(
          windows[r] + layout_.announcement(lane_, sequence_, rank()));
      line.operation = me_.operation;
      line.input = seen_by(r, me_.input, me_.input_region);
      line.output = seen_by(r, me_.output, me_.output_region);
      line.preflight = preflight_;
      shared_word<std::uint32_t>(&line.epoch).store(sequence_, ::cuda::std::memory_order_release);
    }
  }

  static constexpr bool kMovesBytes = std::is_same_v<T, std::byte>;
  static constexpr std::int64_t kSize = sizeof(T);
  // Elements that move in one access; each needs a register for its sum.
  static constexpr int kPerVector = sizeof(T) == 1 ? 8 : 16 / sizeof(T);

  __device__ LaneState& state_of(int lane) const {
    return *reinterpret_cast<LaneState*>(window(me_.rank) + layout_.state(lane));
  }
  // Tells every lane that does not work in this launch how far the group is, because all lanes of a
  // rank count operations alike. Each thread tells one lane.
  __device__ void pass_on() const {
    const int lane = lane_ + (static_cast<int>(threadIdx.x) + 1) * launch_.lanes;
    if (lane < layout_.lanes) state_of(lane).sequence = sequence_;
  }
  // Where rank r's device sees memory of this rank; kNotInWindow if it does not.
  __device__ std::int64_t seen_by(int r, const std::byte* data, RegionTable region) const {
    if (region == nullptr) return kNotInWindow;
    const RegionTable there = region + size();
    return reinterpret_cast<std::int64_t>(there[r]) + reinterpret_cast<std::int64_t>(data) -
           reinterpret_cast<std::int64_t>(there[rank()]);
  }
  __device__ Announcements announcements() const { return {me_, layout_, lane_, sequence_}; }
  __device__ const Announcement& announced(int r) const { return announcements().at(rank(), r); }
  __device__ std::uint32_t* flag(int channel, int from) const {
    return reinterpret_cast<std::uint32_t*>(window(rank()) + layout_.flag(lane_, channel, from));
  }

  // Waits for a flag of rank r. The loads that poll do not acquire, because each acquire empties the
  // multiprocessor's L1 cache. One more load does: it is cheaper than a fence, which also waits for
  // this thread's stores.
  template <class IsIt>
  __device__ bool poll_flag(std::uint32_t* address, int r, IsIt is_it) {
    const auto word = shared_word<std::uint32_t>(address);
    const auto has_come = [=] { return is_it(word.load(::cuda::std::memory_order_relaxed)); };
    const bool come = poll(has_come, r);
    (void)word.load(::cuda::std::memory_order_acquire);
    return come;
  }
  // Waits for a number of signals.
  __device__ bool poll_signals(int channel, int r, std::int64_t step) {
    const std::uint32_t target = started_[channel] + static_cast<std::uint32_t>(step);
    return poll_flag(flag(channel, r), r,
                     [target](std::uint32_t count) { return reached(count, target); });
  }

  // One thread waits for one word of rank r. Returns false if the wait cannot be satisfied.
  template <class HasCome>
  __device__ bool poll(HasCome has_come, int r) {
    if (failed_) return false;
    std::uint64_t start = 0;
    for (unsigned spin = 1; !has_come(); ++spin) {
      if (spin % 256 != 0) continue;
      if (start == 0) start = now_ns();
      const bool gone = shared_word<std::uint32_t>(&me_.mailbox->gone[r])
                            .load(::cuda::std::memory_order_acquire) != 0;
      if (gone && !has_come()) return report(Reason::peer_died, r);
      if (given_up(me_, lane_)) return false;
      if (now_ns() - start > timeout_ns_) return report(Reason::timeout, r);
    }
    return true;
  }

  __device__ bool can_be_direct() const {
    return me_.operation.codec.kind == CodecKind::none && allows_zero_copy(me_.operation);
  }
  // True for the thread that tells the host what this rank does (cuda/progress.cuh).
  __device__ bool tells() const { return lane_ == 0 && threadIdx.x == 0 && !failed_; }
  __device__ auto inside() const {
    return shared_word<std::uint32_t>(&me_.mailbox->lanes[lane_].in_peers_heaps);
  }
  __device__ bool has_announced(int r) {
    const std::uint32_t awaited = sequence_;
    return r == rank() || poll_flag(&announcements().at(rank(), r).epoch, r,
                                    [awaited](std::uint32_t epoch) { return epoch == awaited; });
  }
  // Before this lane uses other ranks' tensors where they lie. It says that it is inside, and then looks
  // for an abort and for all announcements once more. So the host sees the lane inside, or the lane sees
  // the abort; and a rank that has drained has withdrawn its announcement. One thread does what crosses
  // the bus to the host; the barrier of its vote orders the other threads' looks after its fence.
  __device__ void enter_heaps() {
    if (!zero_copy_ || failed_) return;
    bool stop = false;
    if (threadIdx.x == 0) {
      inside().store(1, ::cuda::std::memory_order_relaxed);
      __threadfence_system();
      stop = aborted(me_, lane_);
    }
    vote_to_stop(stop);
    for (int r = threadIdx.x; r < size(); r += blockDim.x) stop |= !has_announced(r);
    vote_to_stop(stop);
  }

  __device__ bool report(Reason reason, int r) {
    return cuda::report(me_, reason, r, me_.operation, me_.operation);
  }

  const Launch& launch_;
  const RankLaunch& me_;
  const WindowLayout& layout_;
  const std::uint64_t timeout_ns_;
  const int lane_;
  std::int64_t begin_;
  std::int64_t count_;
  std::uint32_t sequence_;
  std::uint32_t signalled_[kChannels];
  std::uint32_t started_[kChannels];
  Preflight preflight_;
  bool zero_copy_ = false;
  bool failed_ = false;
};

static_assert(PlainExecutor<BlockComm<float>>);

}  // namespace pycomm::cuda

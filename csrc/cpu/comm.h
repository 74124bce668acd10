// The CPU executor of the algorithms in core/: one rank, a thread or a process, over a Window.
// Not thread-safe: Group serialises.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/executor.h"
#include "core/layout.h"
#include "core/operation.h"
#include "cpu/liveness.h"
#include "cpu/loops.h"
#include "cpu/membership.h"
#include "cpu/store_policy.h"
#include "cpu/window.h"

namespace pycomm::cpu {

// How long a live process may take to let go of a failed rank's tensors.
inline constexpr auto kRetreatWithin = std::chrono::milliseconds(500);

class Comm {
 public:
  static constexpr bool kCoded = false;

  // `first_epoch` is the value all flags count from, the same on every rank.
  // `cores`: how many there are for all ranks together.
  Comm(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank, int size,
       int cores, Clock::duration timeout, std::uint32_t first_epoch);

  // Starts the next operation; an algorithm's call follows. `interrupt` is called now and then in a
  // long wait, and may throw.
  // `preflight` is announced with it.
  void begin(const Operation& operation, const void* input, void* output, void (*interrupt)(),
             Preflight preflight = {});
  // Before begin(): what goes with the operation's hash, in messages; or null. It must live until the
  // operation has ended.
  void set_details(const Details* details) { details_ = details; }
  // Another algorithm follows as a part of the operation that has begun.
  void begin_phase(const Operation& operation, const void* input, void* output,
                   Preflight preflight = {});

  // Ends an operation that has done its part. It counts only if nobody has aborted the group: throws
  // otherwise.
  void finish();
  // This rank touches no other rank's tensors any more, until another phase begins.
  void leave_peers_heaps();
  // After a failure: leaves other ranks' memory alone, and returns when they leave this rank's alone.
  // A live process that does not say so in time loses its access.
  void retreat();
  // This rank's kernels may use tensors in other ranks' heaps from now on; or, after an abort or at
  // their end, do so no more. From any thread.
  void kernels_begin() { mine().kernels_in_peers_heaps.exchange(1); }
  void kernels_ended() { mine().kernels_in_peers_heaps.store(0, std::memory_order_release); }
  // After an abort: returns when no live rank's kernels use other ranks' tensors. False: it takes
  // longer than `patience`. From any thread; `interrupt` may throw.
  bool wait_for_kernels(Clock::duration patience, void (*interrupt)() = nullptr) const;
  Clock::duration patience() const { return timeout_; }
  // The last operation known to have succeeded on every rank.
  std::uint32_t completed() const;
  // The ranks are those of one node among several: another node may be one operation behind.
  void span() { spans_ = true; }

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Whose contributions a result is made of, and which stream of random bits is mine.
  int contributors() const { return size_; }
  std::uint32_t stream() const { return static_cast<std::uint32_t>(rank_); }
  int root() const { return operation_.root; }
  std::int64_t count() const { return operation_.count; }
  std::int64_t block() const { return operation_.count; }
  std::int64_t elements(std::int64_t bytes) const { return bytes / element_size_; }
  std::int64_t line() const { return elements(kLine); }
  bool zero_copy() const { return zero_copy_; }
  Location input() const { return {input_, rank_}; }
  Location output() const { return {output_, rank_}; }
  Location input(int r) const { return {tensors_[static_cast<std::size_t>(r)].input, r}; }
  Location output(int r) const { return {tensors_[static_cast<std::size_t>(r)].output, r}; }
  Location slot(int r, std::int64_t i) const {
    return {window_->staging(r, sequence_) + i * slot_bytes_, r};
  }
  std::int64_t slot_count() const { return elements(slot_bytes_); }
  Location at(Location location, std::int64_t elements) const {
    return {location.data + elements * element_size_, location.rank};
  }

  void announce() {
    publish();
    await_announcements();
  }
  void publish();
  void await_announcements();
  // After await_announcements(): of all ranks.
  Preflight preflight() const;
  // After await_announcements(): the memory in rank r's heap that it has announced as its input. Throws unless so
  // many bytes lie there.
  std::byte* announced_area(int r, std::int64_t bytes);

  bool fits_packets() const { return count() * element_size_ <= kPacketBytes; }
  void put_packets(int r, Location from);
  void take_packets(int r);
  Location taken(int r) { return {taken_.data() + r * kPacketBytes, rank_}; }

  void signal(Channel channel) {
    stream_fence();
    mine().flags[channel].value.store(++signalled_[channel], std::memory_order_release);
    wake();
    ++traffic_.steps;
  }
  void signal(int channel) { signal(static_cast<Channel>(channel)); }

  void wait(int r, int channel, std::int64_t step) {
    if (step <= 0) return;
    wait_for(window_->control(r).flags[channel].value,
             started_[channel] + static_cast<std::uint32_t>(step), r, channel);
  }
  void wait_all(int channel, std::int64_t step) {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) wait(r, channel, step);
    }
  }

  void copy(Location to, Location from, std::int64_t n) {
    if (n == 0 || to.data == from.data) return;
    count_traffic(n, to, from);
    const Target there = target(to);
    const StorePolicy::Timer timer = store_policy_.time(shared(to), n * element_size_);
    cpu::copy(there, from.data, n * element_size_);
  }

  template <class To, class From>
  void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool last) {
    if (n == 0) return;
    bool any_shared = false;
    for (int i = 0; i < n_from; ++i) {
      const Location location = from(i);
      sources_[i] = location.data;
      if (location.rank != rank_) traffic_.bytes_in += n * element_size_;
    }
    for (int i = 0; i < n_to; ++i) {
      const Location location = to(i);
      targets_[i] = target(location);
      any_shared = any_shared || shared(location);
      if (location.rank != rank_) traffic_.bytes_out += n * element_size_;
    }
    const StorePolicy::Timer timer = store_policy_.time(any_shared, n_to * n * element_size_);
    cpu::reduce(last ? last_loop_ : loop_, targets_.data(), n_to, sources_.data(), n_from, n,
                element_size_, size_);
  }

  // From any thread; the first reason given to a group stays.
  void abort(Reason reason, int rank) { abort(abort_word(reason, number(rank))); }
  void abort(std::uint64_t word);
  // Rank r has written what cannot be used.
  [[noreturn]] void blame(int r, const std::string& what) { blame_number(number(r), what); }
  [[noreturn]] void blame_number(int number, const std::string& what);
  // What this node, which has been aborted, tells the others; the same at every call by any rank.
  std::uint64_t last_word();
  // What all nodes have decided_word on; the first word given stays.
  void decide_culprit(std::uint64_t word);
  // The same, for the ranks that carry nothing between nodes: waits for those that do.
  std::uint64_t decided_word();
  // The error that a word stands for, in this operation.
  CollectiveError failure_of(std::uint64_t word) const;
  // Throws if the group has been aborted.
  void check_aborted() const {
    if (const std::uint64_t word = aborted()) throw failure_of(word);
  }
  // For others of this node: I wait for another one, within a deadline of my own.
  void beat() { mine().beats.fetch_add(1, std::memory_order_relaxed); }
  // What the whole group, of which this node's ranks may be a part, calls rank r.
  int number(int r) const { return peers_->number(r); }
  // What the group is called in messages.
  void set_name(std::string name) { membership_.set_name(std::move(name)); }
  // This rank takes part in no further operation.
  void leave() {
    mine().left.store(1, std::memory_order_release);
    wake(true);
  }

  const Traffic& traffic() const { return traffic_; }
  // Bytes moved by an executor on top of this one.
  void count_in(std::int64_t bytes) { traffic_.bytes_in += bytes; }
  std::uint32_t sequence() const { return sequence_; }
  // The number of the operation; it may have several phases, each with a number in sequence.
  std::uint32_t ordinal() const { return ordinal_.load(std::memory_order_relaxed); }
  const Operation& called() const { return called_; }
  // What rank r has published so far, in this operation's announcement or on a channel; also of a
  // rank that is dead.
  std::uint32_t announced(int r) const;
  std::uint32_t published(int r, int channel) const {
    return window_->control(r).flags[channel].value.load(std::memory_order_acquire);
  }
  std::int64_t slot_bytes() const { return slot_bytes_; }

  int pid(int r) const { return peers_->pid(r); }
  int pid_of(int number) const { return peers_->pid_of(number); }
  // Whether a rank of this node waits in an operation that follows this one.
  bool anyone_waits_after(std::uint32_t ordinal) const;
  // Not zero once the group has been aborted.
  std::uint64_t aborted() const { return window_->control(0).abort.load(); }
  // Whether rank r has left, or its process has ended. Takes a system call.
  bool gone(int r) const { return left(r) || ended(r); }

 private:
  Control& mine() const { return window_->control(rank_); }
  Announcement& announcement(int r) const {
    return window_->control(r).announcements[sequence_ & 1u];
  }
  const Announcement& met(int r) const { return met_[static_cast<std::size_t>(r)]; }
  void read_announcement(int r);
  Details& details(int r) const { return window_->control(r).details[sequence_ & 1u]; }
  void empty_packet(std::uint32_t parity, int r, std::int64_t i);
  // `word` is a flag or a packet of rank r; `channel` tells which, for culprit().
  template <class Word>
  void wait_for(const std::atomic<Word>& word, std::uint32_t target, int r, int channel);
  template <class Word>
  void wait_long(const std::atomic<Word>& word, std::uint32_t target, int r, int channel);
  // Sleeps until somebody wakes this rank, or for so long.
  template <class Word>
  void doze(const std::atomic<Word>& word, std::uint32_t target, Clock::duration most);
  // Wakes the ranks that sleep because they wait for this one, or all. A rank that falls asleep at
  // this very moment may be missed: that is why none sleeps for long.
  void wake(bool everyone = false) const {
    if (window_->control(0).asleep.load(std::memory_order_relaxed) != 0) ring(everyone);
  }
  void ring(bool everyone) const;
  void look_for_the_gone();
  bool ended(int r) const { return peers_->ended(r) || replaced(r); }
  bool replaced(int r) const;
  int culprit(int r) const;
  std::string what_keeps(int culprit) const;
  std::uint32_t beats() const;
  void check_agreement();
  void find_tensors();
  void enter_peers_heaps();
  void detach();
  bool left(int r) const { return window_->control(r).left.load(std::memory_order_acquire) != 0; }

  // Read by other ranks next: everything but my own ordinary output.
  bool shared(Location location) const {
    return zero_copy_ || location.data < output_ || location.data >= output_ + output_bytes_;
  }
  Target target(Location location) const { return {location.data, stream_ && shared(location)}; }
  void count_traffic(std::int64_t n, Location to, Location from) {
    if (from.rank != rank_) traffic_.bytes_in += n * element_size_;
    if (to.rank != rank_) traffic_.bytes_out += n * element_size_;
  }

  std::shared_ptr<Window> window_;
  std::shared_ptr<const Liveness> peers_;
  Membership membership_;
  int rank_;
  int size_;
  Clock::duration timeout_;
  std::int64_t slot_bytes_;
  int spins_;
  Clock::duration yield_for_;
  int looked_at_ = 0;
  std::uint32_t sequence_;
  std::atomic<std::uint32_t> ordinal_;  // written by one thread at a time
  const std::uint32_t first_epoch_;
  bool spans_ = false;
  std::uint32_t signalled_[kChannels];
  std::uint32_t started_[kChannels];

  const Details* details_ = nullptr;
  Operation called_;
  Operation operation_;  // of this phase
  Preflight preflight_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::int64_t input_bytes_ = 0;
  std::int64_t output_bytes_ = 0;
  std::int64_t element_size_ = 1;
  ReduceLoop loop_ = nullptr;
  ReduceLoop last_loop_ = nullptr;
  bool zero_copy_ = false;
  bool exposed_ = false;         // tensors lie in this rank's heap, where others may use them
  bool in_peers_heaps_ = false;  // and this rank theirs
  bool stream_ = false;
  StorePolicy store_policy_;
  Traffic traffic_;

  // This operation's announcements, as they were read once: their writers may change them.
  std::vector<Announcement> met_;
  struct Tensors {
    std::byte* input;
    std::byte* output;
  };
  std::vector<Tensors> tensors_;  // of every rank, where all lie in the window
  std::vector<std::byte> taken_;
  std::vector<const void*> sources_;
  std::vector<Target> targets_;
  void (*interrupt_)() = nullptr;
};

static_assert(PlainExecutor<Comm>);

}  // namespace pycomm::cpu

// The CPU executor of the algorithms in core/: one rank, which is a thread or a process, on a
// Window. Not thread-safe: Group serialises calls.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/executor.h"
#include "core/layout.h"
#include "core/operation.h"
#include "core/record.h"
#include "cpu/executor/blocks.h"
#include "cpu/executor/loops.h"
#include "cpu/executor/store_policy.h"
#include "cpu/executor/waiting.h"
#include "cpu/group/membership.h"
#include "cpu/group/node_ranks.h"
#include "cpu/observe/recorder.h"

namespace pycomm::cpu {

// The time that a live process may take to stop using a failed rank's tensors.
inline constexpr auto kRetreatWithin = std::chrono::milliseconds(500);

// How many of each rank's operations an error reports.
inline constexpr std::size_t kReported = 8;

class Comm : public NodeRanks {
 public:
  static constexpr bool kCoded = false;

  // `first_epoch` is the initial value of all flags, the same on every rank. `cores` is the number
  // of cores for all ranks together.
  Comm(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank, int size,
       int cores, Clock::duration timeout, std::uint32_t first_epoch);

  // Begins the next operation, to be followed by an algorithm's call. During a long wait,
  // `interrupt` is called from time to time; it may throw. `preflight` is announced with the
  // operation.
  void begin(const Operation& operation, const void* input, void* output, void (*interrupt)(),
             Preflight preflight = {});
  // Sets the details that belong to the operation's hash, for messages; may be null. Call it before
  // begin(); `details` must live until the operation has ended.
  void set_details(const Details* details) { details_ = details; }
  // Sets how long the next operation waits for a rank, in seconds; 0 for the group's timeout.
  void set_timeout(double seconds) {
    operation_timeout_ =
        seconds > 0
            ? std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))
            : timeout_;
  }
  // The text of one of this rank's subjects; may be empty. From any thread.
  std::string subject(std::uint32_t number) const;
  // Begins another phase of the operation, to be followed by another algorithm's call.
  void begin_phase(const Operation& operation, const void* input, void* output,
                   Preflight preflight = {});

  // Sets where the tensors' blocks lie in this phase; null if they follow each other in the tensor.
  // Call it after begin() or begin_phase(). An operation with such blocks is not done in place.
  void use_blocks(const BlockTable* inputs, const BlockTable* outputs) {
    inputs_ = inputs;
    outputs_ = outputs;
  }

  // Ends an operation after its last phase. Throws if the group has been aborted; the operation has
  // then failed.
  void finish();
  // Tells the others that this rank does not use their tensors until another phase begins.
  void leave_peers_heaps();
  // After a failure: stops using other ranks' memory, and returns when they have stopped using this
  // rank's. A live process that does not confirm this in time loses its access.
  void retreat();
  Clock::duration patience() const { return timeout_; }
  // The last operation known to have succeeded on every rank.
  std::uint32_t completed() const;
  // Says that the group spans nodes, and that this node's first `stripes` ranks carry stripes.
  // Another node may then be one operation behind. `other_nodes` returns what this rank knows of
  // the other nodes; any thread may call it.
  void span(int stripes, std::function<std::vector<NodeState>()> other_nodes) {
    stripes_ = stripes;
    other_nodes_ = std::move(other_nodes);
  }

  // How long a wait polls before it yields the core, and yields before it sleeps.
  int spins() const { return spins_; }
  Yielding yielding() const { return yielding_; }
  // The number of ranks that contribute to a result, and this rank's stream of random bits.
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

  // As a BlockExecutor.
  Location input_at(std::int64_t n) const {
    return inputs_ == nullptr ? at(input(), n) : block_at(*inputs_, n);
  }
  Location output_at(std::int64_t n) const {
    return outputs_ == nullptr ? at(output(), n) : block_at(*outputs_, n);
  }
  std::int64_t input_count(int r) const {
    return inputs_ == nullptr ? count() : inputs_->counts[static_cast<std::size_t>(r)];
  }
  std::int64_t output_count(int r) const {
    return outputs_ == nullptr ? count() : outputs_->counts[static_cast<std::size_t>(r)];
  }

  void announce() {
    publish();
    await_announcements();
  }
  void publish();
  void await_announcements();
  // The preflight of all ranks; valid after await_announcements().
  Preflight preflight() const;
  // The memory in rank r's heap that rank r has announced as its input; valid after
  // await_announcements(). Throws unless `bytes` bytes are there.
  std::byte* announced_area(int r, std::int64_t bytes);

  bool fits_packets() const { return count() * element_size_ <= kPacketBytes; }
  void put_packets(Location from);
  void take_packets();
  Location taken(int r) { return {taken_.data() + r * kPacketBytes, rank_}; }

  void signal(Channel channel) {
    check_attached();
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

  // Aborts the group, from any thread. The first reason stays.
  void abort(Reason reason, int rank) { abort(abort_word(reason, number(rank))); }
  void abort(std::uint64_t word);
  // Aborts the group and throws, because rank r has written invalid data.
  [[noreturn]] void blame(int r, const std::string& what) { blame_number(number(r), what); }
  [[noreturn]] void blame_number(int number, const std::string& what);
  // The word that this node, which has been aborted, sends to the others; the same for every call
  // by any of its ranks.
  std::uint64_t last_word();
  // Sets the word that all nodes have decided on. The first word stays.
  void decide_culprit(std::uint64_t word);
  // The word that all nodes have decided on. Ranks that carry no stripe wait here for a rank that
  // does.
  std::uint64_t decided_word();
  // The number of the rank that has ended the group because it did not answer; -1 if another reason
  // has. Call it after the failure.
  int unresponsive() const;
  // The error that an abort word stands for, in this operation.
  CollectiveError failure_of(std::uint64_t word) const;
  // The same error, with what is known of all ranks.
  CollectiveError with_report(const CollectiveError& error) const;
  // Throws if the group has been aborted.
  void check_aborted() const {
    if (const std::uint64_t word = aborted()) throw failure_of(word);
  }
  // Sets the group's name for messages.
  void set_name(std::string name) { membership_.set_name(std::move(name)); }
  // Says that this rank takes part in no further operation.
  void leave() {
    window_->leave(rank_);
    wake(true);
  }

  // Says that this rank does not use the window any more.
  void depart() {
    membership_.leave();
    window_->depart();
  }

  const Traffic& traffic() const { return traffic_; }
  // Adds bytes that an executor on top of this one has read.
  void count_in(std::int64_t bytes) { traffic_.bytes_in += bytes; }
  std::uint32_t sequence() const { return sequence_; }
  // The number of the operation. An operation may have several phases; each has a sequence number
  // of its own.
  std::uint32_t ordinal() const { return ordinal_.load(std::memory_order_relaxed); }
  const Operation& called() const { return called_; }
  // The values that rank r has published so far in this operation's announcement and on a channel.
  // Also works for a rank that has died.
  std::uint32_t announced(int r) const { return announced(r, sequence_); }
  std::uint32_t published(int r, int channel) const {
    return window_->control(r).flags[channel].value.load(std::memory_order_acquire);
  }
  std::int64_t slot_bytes() const { return slot_bytes_; }
  // True if any rank has signalled on the channel in this operation. Also works after a failure.
  bool anyone_signalled(Channel channel) const;

  // What this node's ranks, or only this one, have done lately, and what they wait for. From any
  // thread, also after a failure.
  GroupState state(std::size_t most, bool only_own = false) const;
  // The state for an error; null if there is no memory for it.
  std::shared_ptr<const GroupState> report() const;
  // What this rank notes of its operations.
  Recorder& recorder() { return recorder_; }
  // True if a rank of this node waits in an operation after the one with this number.
  bool anyone_waits_after(std::uint32_t ordinal) const;
  // The rank to blame for a wait for rank r, which may itself be waiting. From any thread.
  int culprit(int r) const;
  // Describes two messages that do not match; empty if the abort word stands for something else.
  std::string disagreement(std::uint64_t word) const;
  // Returns true when no other rank uses this rank's tensors, as `flag` of every rank shows. If a
  // live process takes too long, `detach` must take its access away.
  bool await_outside(std::atomic<std::uint32_t> Control::* flag,
                     const std::function<void()>& detach) const;

 private:
  // The value in the announcement that operations of this parity use.
  std::uint32_t announced(int r, std::uint32_t parity) const;
  Announcement& announcement(int r) const {
    return window_->control(r).announcements[sequence_ & 1u];
  }
  const Announcement& met(int r) const { return met_[static_cast<std::size_t>(r)]; }
  void read_announcement(int r);
  Details& details(int r) const { return window_->control(r).details[sequence_ & 1u]; }
  void put_packets(int r, Location from);
  void take_packets(int r);
  void empty_packet(std::uint32_t parity, int r, std::int64_t i);
  // `word` is a flag or a packet of rank r; culprit() uses `channel`, which says which one.
  template <class Word>
  void wait_for(const std::atomic<Word>& word, std::uint32_t target, int r, int channel);
  template <class Word>
  void wait_long(const std::atomic<Word>& word, std::uint32_t target, int r, int channel);
  // Sleeps until another rank wakes this one, or for at most `most`.
  template <class Word>
  void doze(const std::atomic<Word>& word, std::uint32_t target, Clock::duration most);
  // Wakes the sleeping ranks that wait for this one, or all sleeping ranks. It may miss a rank that
  // falls asleep at this very moment, so no rank sleeps for long.
  void wake(bool everyone = false) const {
    if (window_->control(0).asleep.load(std::memory_order_relaxed) != 0) ring(everyone);
  }
  void ring(bool everyone) const;
  void look_for_the_gone();
  std::string what_keeps(int culprit) const;
  void check_agreement();
  void find_tensors();
  void enter_peers_heaps();
  // Aborts if another group has failed and taken pages from other processes. If this operation's
  // tensors lie in these pages, this rank may have missed the others' data, and they may miss this
  // rank's.
  void check_attached() {
    if (exposed_ && zero_copy_ && window_->detachments(rank_) != detachments_) {
      abort(Reason::aborted, rank_);
      check_aborted();
    }
  }
  void detach();

  Location block_at(const BlockTable& blocks, std::int64_t n) const {
    const auto r = static_cast<std::size_t>(n / block());
    const std::int64_t offset = std::min(n % block(), blocks.counts[r]);
    return {blocks.addresses[r] + offset * element_size_, rank_};
  }
  bool in_staging(Location location) const {
    const std::byte* const begin = slot(rank_, 0).data;
    return location.data >= begin && location.data < begin + kStagingSlots * slot_bytes_;
  }
  bool in_place() const { return input_ == output_ && input_bytes_ == output_bytes_; }
  // True if other ranks will read the location next, that is, if it is not this rank's own output
  // in ordinary memory.
  bool shared(Location location) const {
    if (outputs_ != nullptr) return in_staging(location);
    return zero_copy_ || location.data < output_ || location.data >= output_ + output_bytes_;
  }
  Target target(Location location) const {
    return {location.data, shared(location) ? stream_ : stream_output_};
  }
  void count_traffic(std::int64_t n, Location to, Location from) {
    if (from.rank != rank_) traffic_.bytes_in += n * element_size_;
    if (to.rank != rank_) traffic_.bytes_out += n * element_size_;
  }

  bool spans() const { return stripes_ > 0; }
  bool has_carrier() const;

  Membership membership_;
  const Clock::duration timeout_;
  Clock::duration operation_timeout_ = timeout_;
  std::int64_t slot_bytes_;
  int spins_;
  Yielding yielding_;
  int looked_at_ = 0;
  std::uint32_t sequence_;
  std::atomic<std::uint32_t> ordinal_;  // written by one thread at a time
  const std::uint32_t first_epoch_;
  Recorder recorder_;
  int stripes_ = 0;
  std::function<std::vector<NodeState>()> other_nodes_;
  std::uint32_t signalled_[kChannels];
  std::uint32_t started_[kChannels];

  const Details* details_ = nullptr;
  Operation called_;
  Operation operation_;  // of the current phase
  Preflight preflight_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::int64_t input_bytes_ = 0;
  std::int64_t output_bytes_ = 0;
  std::int64_t element_size_ = 1;
  const BlockTable* inputs_ = nullptr;
  const BlockTable* outputs_ = nullptr;
  ReduceLoop loop_ = nullptr;
  ReduceLoop last_loop_ = nullptr;
  bool zero_copy_ = false;
  std::uint32_t detachments_ = 0;  // before this rank found its tensors' places
  bool exposed_ = false;           // this rank's tensors are in its heap, where others may use them
  bool in_peers_heaps_ = false;    // this rank may use tensors in other ranks' heaps
  bool stream_ = false;            // what other ranks read
  bool stream_output_ = false;     // this rank's own output
  StorePolicy store_policy_;
  Traffic traffic_;

  // This operation's announcements. Each is read only once, because its writer may change it.
  std::vector<Announcement> met_;
  struct Tensors {
    std::byte* input;
    std::byte* output;
  };
  std::vector<Tensors> tensors_;  // of every rank, if all are in the window
  std::vector<std::byte> taken_;
  std::vector<const void*> sources_;
  std::vector<Target> targets_;
  void (*interrupt_)() = nullptr;
};

static_assert(BlockExecutor<Comm> && PacketExecutor<Comm>);

}  // namespace pycomm::cpu

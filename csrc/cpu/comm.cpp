#include "cpu/comm.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

#include "core/algorithms/packet.h"
#include "core/algorithms/table.h"
#include "core/message.h"
#include "cpu/waiting_time.h"

namespace pycomm::cpu {
namespace {

// How a wait spends its time: a few polls (none where ranks share cores: the peer needs this one),
// then polls with the core offered to others, and sleep once the peer is clearly busy with something
// else. Where ranks share cores that is sooner: those that work would wait for those that poll.
constexpr int kSpins = 20;
constexpr auto kYieldFor = std::chrono::milliseconds(2);
constexpr auto kYieldBriefly = std::chrono::microseconds(100);
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kLongestSleep = std::chrono::milliseconds(10);
constexpr auto kLookEvery = std::chrono::milliseconds(1);
constexpr auto kInterruptEvery = std::chrono::milliseconds(50);
// How long the ranks of several nodes may take to agree whom they blame.
constexpr auto kDecidedWithin = std::chrono::seconds(1);

bool has_come(const std::atomic<std::uint32_t>& flag, std::uint32_t target) {
  return reached(flag.load(std::memory_order_acquire), target);
}

// Exactly this operation's: a place may have been left alone for longer than epochs can tell.
bool has_come(const std::atomic<std::uint64_t>& packet, std::uint32_t target) {
  return packet_sequence(packet.load(std::memory_order_relaxed)) == target;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::atomic_ref<std::uint32_t> epoch_of(Announcement& announcement) {
  return std::atomic_ref<std::uint32_t>(announcement.epoch);
}

}  // namespace

Comm::Comm(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
           int size, int cores, Clock::duration timeout, std::uint32_t first_epoch)
    : window_(std::move(window)),
      peers_(std::move(peers)),
      membership_(window_, peers_, rank, size),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      slot_bytes_(window_->half_bytes() / kStagingSlots / kLine * kLine),
      spins_(size <= cores ? kSpins : 0),
      yield_for_(size <= cores ? Clock::duration(kYieldFor) : kYieldBriefly),
      sequence_(first_epoch),
      ordinal_(first_epoch),
      first_epoch_(first_epoch),
      met_(static_cast<std::size_t>(size)),
      tensors_(static_cast<std::size_t>(size)),
      taken_(static_cast<std::size_t>(size * kPacketBytes)),
      sources_(static_cast<std::size_t>(size) + 1),
      targets_(static_cast<std::size_t>(size) + 1) {
  PYCOMM_CHECK(slot_bytes_ >= size * kLine, "staging_bytes must be at least " +
                                                std::to_string(2 * kStagingSlots * size * kLine) +
                                                " for this world size");
  window_->populate(rank);
  for (int channel = 0; channel < kChannels; ++channel) {
    signalled_[channel] = first_epoch;
    mine().flags[channel].value.store(first_epoch, std::memory_order_release);
  }
  mine().completed.store(first_epoch, std::memory_order_release);
  mine().holds.store(window_->hold(rank_) ? 1 : 0, std::memory_order_release);
  for (Announcement& announcement : mine().announcements) {
    epoch_of(announcement).store(first_epoch, std::memory_order_release);
  }
}

void Comm::begin(const Operation& operation, const void* input, void* output, void (*interrupt)(),
                 Preflight preflight) {
  ordinal_.store(next_sequence(ordinal()), std::memory_order_relaxed);
  called_ = operation;
  interrupt_ = interrupt;
  traffic_ = {};
  begin_phase(operation, input, output, preflight);
}

void Comm::begin_phase(const Operation& operation, const void* input, void* output,
                       Preflight preflight) {
  sequence_ = next_sequence(sequence_);
  operation_ = operation;
  preflight_ = preflight;
  element_size_ = size_of(operation.dtype);
  input_ = static_cast<std::byte*>(const_cast<void*>(input));
  output_ = static_cast<std::byte*>(output);
  input_bytes_ = input_bytes(operation, size_);
  output_bytes_ = output_bytes(operation, size_);
  loop_ = reduce_loop(operation.dtype, operation.op, false);
  last_loop_ = reduce_loop(operation.dtype, operation.op, true);
  zero_copy_ = exposed_ = false;
  leave_peers_heaps();
  stream_ = store_policy_.next(operation.count * element_size_);
  for (int channel = 0; channel < kChannels; ++channel) started_[channel] = signalled_[channel];
  check_aborted();
}

void Comm::publish() {
  Announcement& mine = met_[static_cast<std::size_t>(rank_)];
  // Of top-k, the input is an area for lists, whatever the tensor's size.
  const bool lists = operation_.codec.kind == CodecKind::topk;
  mine.operation = operation_;
  mine.preflight = preflight_;
  mine.input = window_->place_in_heap(rank_, input_, lists ? 0 : input_bytes_);
  mine.output = input_ == output_ && input_bytes_ == output_bytes_
                    ? mine.input
                    : window_->place_in_heap(rank_, output_, lists ? 0 : output_bytes_);
  exposed_ = !lists && (mine.input != kNotInWindow || mine.output != kNotInWindow);
  Announcement& announced = announcement(rank_);
  announced.operation = mine.operation;
  announced.preflight = mine.preflight;
  announced.input = mine.input;
  announced.output = mine.output;
  if (operation_.details != 0) details(rank_) = *details_;
  stream_fence();
  epoch_of(announced).store(sequence_, std::memory_order_release);
  wake();
}

void Comm::await_announcements() {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const auto& epoch =
        *reinterpret_cast<const std::atomic<std::uint32_t>*>(&announcement(r).epoch);
    wait_for(epoch, sequence_, r, kAnnouncement);
    read_announcement(r);
  }
  check_agreement();

  const bool scatters = operation_.collective == Collective::reduce_scatter;
  const bool gathers = operation_.collective == Collective::all_gather;
  zero_copy_ = allows_zero_copy(operation_);
  for (int r = 0; r < size_; ++r) {
    zero_copy_ = zero_copy_ && (gathers || met(r).input != kNotInWindow) &&
                 (scatters || met(r).output != kNotInWindow);
  }
  if (zero_copy_) enter_peers_heaps();
}

// Where the tensors of all ranks lie in this process.
void Comm::find_tensors() {
  for (int r = 0; r < size_; ++r) {
    const auto find = [&](std::int64_t offset, std::byte* own, std::int64_t bytes) -> std::byte* {
      if (r == rank_ || offset == kNotInWindow) return r == rank_ ? own : nullptr;
      return window_->in_heap(r, offset, bytes);
    };
    tensors_[static_cast<std::size_t>(r)] = {find(met(r).input, input_, input_bytes_),
                                             find(met(r).output, output_, output_bytes_)};
  }
}

void Comm::read_announcement(int r) {
  try {
    met_[static_cast<std::size_t>(r)] =
        parse_announcement(std::as_bytes(std::span(&announcement(r), 1)), size_,
                           window_->heap_begin(), window_->slice_bytes());
  } catch (const std::invalid_argument& error) {
    blame(r, error.what());
  }
}

// Either this rank sees an abort here, or the rank that aborts sees this rank in its heap: both write
// first and look afterwards, in one total order.
void Comm::enter_peers_heaps() {
  find_tensors();
  in_peers_heaps_ = true;
  mine().in_peers_heaps.exchange(1);
  check_aborted();
}

void Comm::leave_peers_heaps() {
  if (!in_peers_heaps_) return;
  in_peers_heaps_ = false;
  stream_fence();
  mine().in_peers_heaps.store(0, std::memory_order_release);
}

void Comm::finish() {
  check_aborted();
  leave_peers_heaps();
  mine().completed.store(ordinal(), std::memory_order_release);
}

void Comm::retreat() {
  leave_peers_heaps();
  if (!exposed_) return;
  bool can_detach = true;
  WaitingTime waited;
  for (int r = 0; r < size_; ++r) {
    while (r != rank_ && window_->control(r).in_peers_heaps.load() != 0 && !ended(r)) {
      const Clock::duration time = waited.until(Clock::now());
      // A thread of this process cannot be kept out, and need not: it is on its way.
      if (can_detach && peers_->watched(r) && time > kRetreatWithin) {
        try {
          return detach();
        } catch (const std::system_error&) {
          can_detach = false;  // no memory for the pages: only patience is left
        }
      }
      if (time > kRetreatWithin + timeout_) return;
      std::this_thread::sleep_for(kNap);
    }
  }
  exposed_ = false;
}

// The pages of this rank's tensors, each once.
void Comm::detach() {
  const auto pages_of = [](std::int64_t offset, std::int64_t bytes) {
    if (offset == kNotInWindow) return Range{0, 0};
    const std::int64_t begin = offset / kPage * kPage;
    return Range{begin, round_up(offset + bytes, kPage) - begin};
  };
  const Range input = pages_of(met(rank_).input, input_bytes_);
  const Range output = pages_of(met(rank_).output, output_bytes_);
  const std::int64_t input_end = input.begin + input.count;
  const std::int64_t output_end = output.begin + output.count;
  if (input.begin < output_end && output.begin < input_end) {
    const std::int64_t begin = std::min(input.begin, output.begin);
    window_->detach(rank_, {begin, std::max(input_end, output_end) - begin});
  } else {
    if (input.count > 0) window_->detach(rank_, input);
    if (output.count > 0) window_->detach(rank_, output);
  }
}

bool Comm::wait_for_kernels(Clock::duration patience, void (*interrupt)()) const {
  WaitingTime waited;
  Clock::time_point interrupt_at = Clock::now() + kInterruptEvery;
  for (int r = 0; r < size_; ++r) {
    const std::atomic<std::uint32_t>& inside = window_->control(r).kernels_in_peers_heaps;
    while (inside.load() != 0 && !ended(r)) {
      const Clock::time_point now = Clock::now();
      if (waited.until(now) > patience) return false;
      if (interrupt != nullptr && now > interrupt_at) {
        interrupt();
        interrupt_at = now + kInterruptEvery;
      }
      std::this_thread::sleep_for(kLookEvery);
    }
  }
  return true;
}

std::uint32_t Comm::completed() const {
  std::uint32_t least = window_->control(0).completed.load(std::memory_order_acquire);
  for (int r = 1; r < size_; ++r) {
    const std::uint32_t theirs = window_->control(r).completed.load(std::memory_order_acquire);
    if (!reached(theirs, least)) least = theirs;
  }
  return spans_ && least != first_epoch_ ? least - 1 : least;
}

Preflight Comm::preflight() const {
  Preflight all = met(0).preflight;
  for (int r = 1; r < size_; ++r) all = all | met(r).preflight;
  return all;
}

std::byte* Comm::announced_area(int r, std::int64_t bytes) {
  const std::int64_t begin = met(r).input;
  if (begin < window_->heap_begin() || begin > window_->slice_bytes() - bytes) {
    blame(r, "an announced area lies outside the heap");
  }
  return window_->in_heap(r, begin, bytes);
}

std::uint32_t Comm::announced(int r) const {
  return epoch_of(announcement(r)).load(std::memory_order_acquire);
}

void Comm::check_agreement() {
  for (int r = 1; r < size_; ++r) {
    if (met(r).operation == met(0).operation) continue;
    abort(Reason::mismatch, r);
    check_aborted();
  }
}

void Comm::put_packets(int r, Location from) {
  std::atomic<std::uint64_t>* packets = window_->packets(r, sequence_, rank_);
  const std::int64_t bytes = count() * element_size_;
  for (std::int64_t done = 0; done < bytes; done += 4) {
    const std::int64_t n = std::min<std::int64_t>(4, bytes - done);
    std::uint32_t data = 0;
    std::memcpy(&data, from.data + done, static_cast<std::size_t>(n));
    packets[done / 4].store(make_packet(data, sequence_), std::memory_order_relaxed);
  }
  wake();
  traffic_.bytes_out += 2 * round_up(bytes, 4);
}

// No operation that uses an area has a number of the other parity.
void Comm::empty_packet(std::uint32_t parity, int r, std::int64_t i) {
  window_->packets(rank_, parity, r)[i].store(make_packet(0, ~parity & 1u),
                                              std::memory_order_relaxed);
}

void Comm::take_packets(int r) {
  const std::atomic<std::uint64_t>* packets = window_->packets(rank_, sequence_, r);
  std::byte* to = taken(r).data;
  for (std::int64_t done = 0; done < count() * element_size_; done += 4) {
    const std::atomic<std::uint64_t>& packet = packets[done / 4];
    wait_for(packet, sequence_, r, kPacket);
    const std::uint32_t data = packet_data(packet.load(std::memory_order_relaxed));
    std::memcpy(to + done, &data, 4);
    empty_packet(sequence_, r, done / 4);
  }
}

template <class Word>
void Comm::wait_for(const std::atomic<Word>& word, std::uint32_t target, int r, int channel) {
  if (has_come(word, target)) return;
  for (int i = 0; i < spins_; ++i) {
    pause();
    if (has_come(word, target)) return;
  }
  wait_long(word, target, r, channel);
}
template void Comm::wait_for(const std::atomic<std::uint32_t>&, std::uint32_t, int, int);

template <class Word>
void Comm::wait_long(const std::atomic<Word>& word, std::uint32_t target, int r, int channel) {
  mine().waiting.store(waiting_word({r, channel, target}), std::memory_order_release);
  const Clock::time_point start = Clock::now();
  Clock::time_point look_at = start + kLookEvery, interrupt_at = start + kInterruptEvery;
  WaitingTime waited(start);
  ToldWait told(membership_);
  Clock::duration sleep = kNap;
  std::uint32_t beats_seen = beats();
  while (!has_come(word, target)) {
    check_aborted();
    const Clock::time_point now = Clock::now();
    waited.until(now);
    if (now > look_at) {
      look_for_the_gone();
      look_at = now + kLookEvery;
      if (const std::uint32_t heard = beats(); heard != beats_seen) {
        beats_seen = heard;
        waited.restart();
      }
    }
    if (waited.time() > timeout_) {
      abort(timeout_word(number(culprit(r)), number(rank_), waited.seconds()));
    } else if (now > interrupt_at) {
      told.tell(culprit(r), called_, ordinal());
      if (interrupt_ != nullptr) interrupt_();
      interrupt_at = now + kInterruptEvery;
    }
    if (now - start < yield_for_) {
      sched_yield();
    } else {
      sleep = std::min<Clock::duration>(2 * sleep, kLongestSleep);
      doze(word, target, sleep);
    }
  }
  mine().waiting.store(0, std::memory_order_release);
  told.over();
}

template <class Word>
void Comm::doze(const std::atomic<Word>& word, std::uint32_t target, Clock::duration most) {
  std::atomic<std::uint32_t>& asleep = window_->control(0).asleep;
  const std::uint32_t rung = mine().bell.rung();
  asleep.fetch_add(1);
  if (!has_come(word, target) && aborted() == 0) mine().bell.sleep(rung, most);
  asleep.fetch_sub(1);
}

void Comm::ring(bool everyone) const {
  for (int r = 0; r < size_; ++r) {
    const auto waiting = parse_waiting(window_->control(r).waiting.load(), size_);
    if (waiting && (everyone || waiting->rank == rank_)) window_->control(r).bell.ring();
  }
}

// Looks at all ranks, not only at the one that is waited for: a rank that has left or died before it
// had done its part of the operation never will.
void Comm::look_for_the_gone() {
  const auto check = [this](int r) {
    const std::uint32_t done = window_->control(r).completed.load(std::memory_order_acquire);
    if (!reached(done, ordinal())) abort(Reason::peer_died, r);
  };
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && left(r)) check(r);
  }
  peers_->find_ended(check);
  looked_at_ = (looked_at_ + 1) % size_;  // one at a time: each takes a system call
  if (replaced(looked_at_)) check(looked_at_);
}

// Whether the process of rank r has become another program.
bool Comm::replaced(int r) const {
  return peers_->watched(r) && window_->control(r).holds.load(std::memory_order_acquire) != 0 &&
         !window_->held(r);
}

// I wait for `r`, who may in turn wait for somebody else: the rank to blame waits for nobody, or
// for something that has long come.
int Comm::culprit(int r) const {
  for (int hops = 0; hops < size_; ++hops) {
    const auto waiting =
        parse_waiting(window_->control(r).waiting.load(std::memory_order_acquire), size_);
    if (!waiting) return r;
    const auto [next, channel, target] = *waiting;
    if (channel != kPacket) {
      const std::uint32_t value =
          channel == kAnnouncement ? announced(next) : published(next, channel);
      if (reached(value, target)) return r;
    }
    r = next;
  }
  return r;
}

bool Comm::anyone_waits_after(std::uint32_t ordinal) const {
  for (int r = 0; r < size_; ++r) {
    const Control& theirs = window_->control(r);
    // In this order: a wait that ends meanwhile is none that follows.
    if (reached(theirs.completed.load(), ordinal) && theirs.waiting.load() != 0) return true;
  }
  return false;
}

// Of all ranks: whoever waits for one of them may wait for a node that it waits for.
std::uint32_t Comm::beats() const {
  std::uint32_t sum = 0;
  for (int r = 0; r < size_; ++r) {
    sum += window_->control(r).beats.load(std::memory_order_relaxed);
  }
  return sum;
}

void Comm::abort(std::uint64_t word) {
  std::uint64_t none = 0;
  window_->control(0).abort.compare_exchange_strong(none, word);
  wake(true);
}

void Comm::blame_number(int number, const std::string& what) {
  const std::uint64_t word = abort_word(Reason::malformed, number);
  abort(word);
  if (aborted() != word) check_aborted();
  throw malformed(number, peers_->pid_of(number), called_, ordinal(), what);
}

// The least of the first reason and of the deaths that can be seen by then: a rank that is waited for
// by nobody may have died, too.
std::uint64_t Comm::last_word() {
  std::uint64_t word = aborted();
  for (int r = 0; r < size_; ++r) {
    if (!left(r) && ended(r)) word = std::min(word, abort_word(Reason::peer_died, number(r)));
  }
  std::uint64_t none = 0;
  window_->control(0).last_word.compare_exchange_strong(none, word);
  return window_->control(0).last_word.load();
}

void Comm::decide_culprit(std::uint64_t word) {
  std::uint64_t none = 0;
  window_->control(0).decided_word.compare_exchange_strong(none, word);
}

std::uint64_t Comm::decided_word() {
  if (!spans_) return aborted();
  const std::atomic<std::uint64_t>& word = window_->control(0).decided_word;
  for (WaitingTime waited; word.load() == 0;) {
    if (waited.until(Clock::now()) > kDecidedWithin) decide_culprit(last_word());
    std::this_thread::sleep_for(kNap);
  }
  return word.load();
}

// What a rank waits for in another group, if it is on this node.
std::string Comm::what_keeps(int culprit) const {
  for (int r = 0; r < size_; ++r) {
    if (number(r) == culprit) return membership_.describe(r);
  }
  return {};
}

CollectiveError Comm::failure_of(std::uint64_t word) const {
  if (!is_abort_word(word, peers_->count())) return overwritten(called_, ordinal());
  const int culprit = rank_of(word), pid = peers_->pid_of(culprit);
  if (reason_of(word) == Reason::mismatch && announced(0) == sequence_) {
    const Operation& first = announcement(0).operation;
    for (int r = 1; r < size_; ++r) {
      const Operation& other = announcement(r).operation;
      if (number(r) != culprit || announced(r) != sequence_ || other == first) continue;
      return mismatch(number(0), first, culprit, other, pid, ordinal(), &details(0), &details(r));
    }
  }
  if (reason_of(word) == Reason::timeout) {
    const CollectiveError error = timeout(word, culprit == number(rank_), pid, called_, ordinal());
    const std::string why = what_keeps(culprit);
    return why.empty() ? error : error.because(why);
  }
  return failure(reason_of(word), culprit, pid, called_, ordinal());
}

}  // namespace pycomm::cpu

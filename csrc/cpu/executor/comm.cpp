#include "cpu/executor/comm.h"

#include <algorithm>
#include <cstring>

#include "core/algorithms/packet.h"
#include "core/algorithms/table.h"
#include "core/message.h"
#include "cpu/executor/waiting.h"

namespace pycomm::cpu {
namespace {

std::atomic_ref<std::uint32_t> epoch_of(Announcement& announcement) {
  return std::atomic_ref<std::uint32_t>(announcement.epoch);
}

// True if an operation may use a staging slot beyond the first bytes, as many as its tensor has:
// blocks for several ranks lie apart (core/algorithms/two_shot.h), and codecs have layouts of their
// own.
bool fills_slots(const Operation& operation) {
  const Collective collective = operation.collective;
  return operation.codec.kind != CodecKind::none || collective == Collective::reduce_scatter ||
         collective == Collective::all_to_all || collective == Collective::scatter;
}

}  // namespace

Comm::Comm(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
           int size, int cores, Clock::duration timeout, std::uint32_t first_epoch)
    : NodeRanks(std::move(window), std::move(peers), rank, size),
      membership_(window_, peers_, rank, size),
      timeout_(timeout),
      slot_bytes_(window_->slot_bytes()),
      spins_(size <= cores ? kSpins : 0),
      yielding_(size <= cores ? Clock::duration(kYieldFor) : kYieldBriefly),
      sequence_(first_epoch),
      ordinal_(first_epoch),
      first_epoch_(first_epoch),
      recorder_(window_->records(rank), mine(), first_epoch),
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
  mine().identity.store(identity_word(peers_->pid(rank), number(rank)), std::memory_order_release);
}

void Comm::begin(const Operation& operation, const void* input, void* output, void (*interrupt)(),
                 Preflight preflight) {
  ordinal_.store(next_sequence(ordinal()), std::memory_order_relaxed);
  called_ = operation;
  recorder_.begin();
  if (spans() || size_ == 1) recorder_.enter(called_, ordinal());  // nobody waits for this rank
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
  input_bytes_ = input_bytes(operation, size_, rank_);
  output_bytes_ = output_bytes(operation, size_, rank_);
  if (!stays_in_node(operation.collective)) {
    window_->need_staging(
        rank_, fills_slots(operation) ? slot_bytes_ : std::max(input_bytes_, output_bytes_));
  }
  loop_ = reduce_loop(operation.dtype, operation.op, false);
  last_loop_ = reduce_loop(operation.dtype, operation.op, true);
  use_blocks(nullptr, nullptr);
  zero_copy_ = exposed_ = false;
  leave_peers_heaps();
  stream_ = store_policy_.next(operation.count * element_size_);
  stream_output_ = output_bytes_ >= kStreamedOutput && !in_place();
  for (int channel = 0; channel < kChannels; ++channel) started_[channel] = signalled_[channel];
  check_aborted();
}

void Comm::publish() {
  Announcement& mine = met_[static_cast<std::size_t>(rank_)];
  // For top-k, the input is an area for lists, whose size does not depend on the tensor's.
  const bool lists = operation_.codec.kind == CodecKind::topk;
  mine.operation = operation_;
  mine.preflight = preflight_;
  detachments_ = window_->detachments(rank_);
  if (inputs_ != nullptr || outputs_ != nullptr) {
    mine.input = mine.output = kNotInWindow;
  } else {
    mine.input = window_->place_in_heap(rank_, input_, lists ? 0 : input_bytes_);
    mine.output =
        in_place() ? mine.input : window_->place_in_heap(rank_, output_, lists ? 0 : output_bytes_);
  }
  exposed_ = !lists && (mine.input != kNotInWindow || mine.output != kNotInWindow);
  Announcement& announced = announcement(rank_);
  announced.operation = mine.operation;
  announced.preflight = mine.preflight;
  announced.input = mine.input;
  announced.output = mine.output;
  if (operation_.details != 0 || (details_ != nullptr && details_->label_bytes != 0)) {
    Details& told = details(rank_);
    told = *details_;
    told.sequence = sequence_;
  }
  stream_fence();
  epoch_of(announced).store(sequence_, std::memory_order_release);
  wake();
  recorder_.enter(called_, ordinal());  // now that the others need not wait for it
}

void Comm::await_announcements() {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const auto& epoch =
        *reinterpret_cast<const std::atomic<std::uint32_t>*>(&announcement(r).epoch);
    wait_for(epoch, sequence_, r, kAnnouncement);
    read_announcement(r);
  }
  recorder_.arrive();
  check_agreement();

  zero_copy_ = allows_zero_copy(operation_);
  for (int r = 0; r < size_; ++r) {
    zero_copy_ = zero_copy_ && (met(r).input != kNotInWindow || !shares_input(operation_, r)) &&
                 (met(r).output != kNotInWindow || !shares_output(operation_, r));
  }
  if (zero_copy_) enter_peers_heaps();
}

// Finds the addresses of all ranks' tensors in this process.
void Comm::find_tensors() {
  for (int r = 0; r < size_; ++r) {
    const auto find = [&](std::int64_t offset, std::byte* own, std::int64_t bytes) -> std::byte* {
      if (r == rank_ || offset == kNotInWindow) return r == rank_ ? own : nullptr;
      return window_->in_heap(r, offset, bytes);
    };
    tensors_[static_cast<std::size_t>(r)] = {
        find(met(r).input, input_, input_bytes(operation_, size_, r)),
        find(met(r).output, output_, output_bytes(operation_, size_, r))};
  }
}

void Comm::read_announcement(int r) {
  try {
    met_[static_cast<std::size_t>(r)] =
        parse_announcement(std::as_bytes(std::span(&announcement(r), 1)), size_, r,
                           window_->heap_begin(), window_->slice_bytes());
  } catch (const std::invalid_argument& error) {
    blame(r, error.what());
  }
}

// Either this rank sees an abort here, or the aborting rank sees that this rank is in its heap:
// both write first and read afterwards, in one total order.
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
  check_attached();
  leave_peers_heaps();
  stream_fence();  // the caller may tell another thread of its output
  mine().completed.store(ordinal(), std::memory_order_release);
  recorder_.end(called_);
}

std::uint32_t Comm::completed() const {
  std::uint32_t least = window_->control(0).completed.load(std::memory_order_acquire);
  for (int r = 1; r < size_; ++r) {
    const std::uint32_t theirs = window_->control(r).completed.load(std::memory_order_acquire);
    if (!reached(theirs, least)) least = theirs;
  }
  return spans() && least != first_epoch_ ? least - 1 : least;
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

bool Comm::anyone_signalled(Channel channel) const {
  for (int r = 0; r < size_; ++r) {
    if (reached(published(r, channel), started_[channel] + 1)) return true;
  }
  return false;
}

std::uint32_t Comm::announced(int r, std::uint32_t parity) const {
  return epoch_of(window_->control(r).announcements[parity & 1u]).load(std::memory_order_acquire);
}

void Comm::check_agreement() {
  for (int r = 1; r < size_; ++r) {
    if (met(r).operation == met(0).operation) continue;
    abort(Reason::mismatch, r);
    check_aborted();
  }
}

void Comm::put_packets(Location from) {
  for (int i = 1; i < size_; ++i) put_packets((rank_ + i) % size_, from);
  wake();
  recorder_.enter(called_, ordinal());
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
  traffic_.bytes_out += 2 * round_up(bytes, 4);
}

// Stores a sequence number of the other parity, which no operation that uses this area has.
void Comm::empty_packet(std::uint32_t parity, int r, std::int64_t i) {
  window_->packets(rank_, parity, r)[i].store(make_packet(0, ~parity & 1u),
                                              std::memory_order_relaxed);
}

void Comm::take_packets() {
  for (int i = 1; i < size_; ++i) take_packets((rank_ + i) % size_);
  recorder_.arrive();
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
    pause_core();
    if (has_come(word, target)) return;
  }
  wait_long(word, target, r, channel);
}
template void Comm::wait_for(const std::atomic<std::uint32_t>&, std::uint32_t, int, int);

}  // namespace pycomm::cpu

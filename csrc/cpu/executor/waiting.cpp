// Long waits: they sleep, look for ranks that are gone, and end at a deadline.
#include "cpu/executor/waiting.h"

#include <sched.h>

#include <algorithm>

#include "core/message.h"
#include "cpu/executor/comm.h"
#include "cpu/executor/waiting_time.h"

namespace pycomm::cpu {

template <class Word>
void Comm::wait_long(const std::atomic<Word>& word, std::uint32_t target, int r, int channel) {
  recorder_.wait_long();
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
    if (waited.time() > operation_timeout_) {
      abort(timeout_word(number(culprit(r)), number(rank_), waited.seconds()));
    } else if (now > interrupt_at) {
      told.tell(culprit(r), called_, ordinal());
      if (interrupt_ != nullptr) interrupt_();
      interrupt_at = now + kInterruptEvery;
    }
    if (yielding_.pays(start, now)) {
      sched_yield();
      yielding_.took(now, Clock::now());
    } else {
      sleep = std::min<Clock::duration>(2 * sleep, kLongestSleep);
      doze(word, target, sleep);
    }
  }
  mine().waiting.store(0, std::memory_order_release);
  told.over();
}

template void Comm::wait_long(const std::atomic<std::uint32_t>&, std::uint32_t, int, int);
template void Comm::wait_long(const std::atomic<std::uint64_t>&, std::uint32_t, int, int);

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

// Checks all ranks, not only the one that this rank waits for: a rank that has left or died before
// it finished its part of the operation never will.
void Comm::look_for_the_gone() {
  const auto check = [this](int r) {
    const std::uint32_t done = window_->control(r).completed.load(std::memory_order_acquire);
    if (!reached(done, ordinal())) abort(Reason::peer_died, r);
  };
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && left(r)) check(r);
  }
  peers_->find_ended(check);
  looked_at_ = (looked_at_ + 1) % size_;  // one per call: each costs a system call
  if (replaced(looked_at_)) check(looked_at_);
}

// This rank waits for `r`, which may in turn wait for another rank. The rank to blame waits for
// nobody, or for something that has already come. If all wait in a circle, it is `r` itself.
int Comm::culprit(int r) const {
  const int first = r;
  for (int hops = 0; hops < size_; ++hops) {
    const auto waiting =
        parse_waiting(window_->control(r).waiting.load(std::memory_order_acquire), size_);
    if (!waiting) {
      const int sender = awaited_sender(window_->control(r).p2p_waiting.load(), Clock::now());
      if (sender < 0 || sender >= size_) return r;
      r = sender;
    } else {
      const auto [next, channel, target] = *waiting;
      if (channel != kPacket) {
        const std::uint32_t value =
            channel == kAnnouncement ? announced(next, target) : published(next, channel);
        if (reached(value, target)) return r;
      }
      r = next;
    }
    if (r == rank_) return first;
  }
  return r;
}

bool Comm::anyone_waits_after(std::uint32_t ordinal) const {
  for (int r = 0; r < size_; ++r) {
    const Control& theirs = window_->control(r);
    // In this order, so that a wait that ends in between does not count as a wait in a later
    // operation.
    if (reached(theirs.completed.load(), ordinal) && theirs.waiting.load() != 0) return true;
  }
  return false;
}

}  // namespace pycomm::cpu

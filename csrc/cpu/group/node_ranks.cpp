#include "cpu/group/node_ranks.h"

#include <thread>

#include "cpu/executor/waiting.h"
#include "cpu/executor/waiting_time.h"

namespace pycomm::cpu {

int NodeRanks::index_of(int number) const {
  for (int r = 0; r < size_; ++r) {
    if (this->number(r) == number) return r;
  }
  return -1;
}

// True if the process of rank r has executed another program.
bool NodeRanks::replaced(int r) const {
  return peers_->watched(r) && window_->control(r).holds.load(std::memory_order_acquire) != 0 &&
         !window_->held(r);
}

Outcome NodeRanks::settle(std::uint64_t number, Outcome mine) const {
  std::atomic<std::uint64_t>& word = window_->control(0).outcomes[number & 1];
  std::uint64_t settled = word.load();
  while (settled >> 2 != number) {
    const std::uint64_t wanted = number << 2 | static_cast<std::uint64_t>(mine);
    if (word.compare_exchange_strong(settled, wanted)) return mine;
  }
  return static_cast<Outcome>(settled & 3);
}

bool NodeRanks::wait_for_kernels(Clock::duration patience, void (*interrupt)()) const {
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

std::uint32_t NodeRanks::beats() const {
  std::uint32_t sum = 0;
  for (int r = 0; r < size_; ++r) {
    sum += window_->control(r).beats.load(std::memory_order_relaxed);
  }
  return sum;
}

}  // namespace pycomm::cpu

// Which parts of a device's memory are free, for tensors in a rank's CUDA window. It works with
// addresses, and touches none of the memory. Thread-safe. It needs no interpreter, so allocators of
// other libraries may call it while they hold their locks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/signal.h"
#include "cpu/group/fork.h"
#include "cpu/memory/free_ranges.h"

namespace pycomm::cpu {

// Waits until a device has done all that this rank has enqueued. Returns true if no rank uses tensors
// that the rank had released before: an operation ends when every rank has passed it, unless it fails.
template <class Device, class Group>
bool await_unused(Device& device, const Group& group) {
  device.synchronize();
  return device.failure().reason == Reason::none && group.abort_word() == 0;
}

class DeviceHeap {
 public:
  // As await_unused().
  using Wait = std::function<bool()>;

  static constexpr std::int64_t kUnit = 256;

  // `begin` is not 0.
  DeviceHeap(std::uintptr_t begin, std::int64_t bytes, Wait wait)
      : begin_(begin), bytes_(bytes), wait_(std::move(wait)), free_({0, bytes}, kUnit) {}

  // Takes the first free range that is large enough, and returns its address. If there is none, and
  // `may_wait`, first frees what was released, for which it waits for the device. Returns 0 if
  // there is no room. Zero bytes take a unit, too.
  std::uintptr_t take(std::int64_t bytes, bool may_wait) {
    {
      const std::lock_guard lock(mutex_);
      if (const std::uintptr_t found = take_free(bytes); found != 0 || !may_wait) return found;
    }
    const std::lock_guard one_at_a_time(reclaiming_);
    return reclaim_and_take(bytes);
  }

  // Releases what take() has returned. The device may still be using it. In a forked child, the
  // memory is the parent's, and a thread that is not there may hold the lock.
  void release(std::uintptr_t address) {
    if (forks_ != current_forks()) return;
    const std::lock_guard lock(mutex_);
    const auto used = used_.find(address);
    PYCOMM_CHECK(used != used_.end(), "the address is not a block of this heap");
    released_.push_back(used->second);
    used_.erase(used);
  }

  // Hands out nothing from now on, and does not wait for the device any more.
  void close() {
    const std::scoped_lock lock(reclaiming_, mutex_);
    closed_ = true;
  }

  // True if the heap hands out nothing, and nobody has a block of it.
  bool over() const {
    const std::lock_guard lock(mutex_);
    return closed_ && used_.empty();
  }

  bool contains(std::uintptr_t address) const {
    return address - begin_ < static_cast<std::uintptr_t>(bytes_);
  }

  // Why there is no room.
  std::string refusal(std::int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    if (closed_) return "the group is closed: the heap of its CUDA window makes no more tensors";
    return "the CUDA window's heap has no room for " + std::to_string(bytes) + " bytes: of " +
           std::to_string(bytes_) + " bytes " + std::to_string(free_.total()) +
           " are free, the largest block has " + std::to_string(free_.largest()) +
           ": make the group with a larger cuda_heap_bytes";
  }

 private:
  // With mutex_.
  std::uintptr_t take_free(std::int64_t bytes) {
    const auto found = closed_ ? std::nullopt : free_.take(bytes);
    if (!found) return 0;
    const std::uintptr_t address = begin_ + static_cast<std::uintptr_t>(found->begin);
    used_[address] = *found;
    return address;
  }

  // Frees what was released before this call, unless an operation has failed. What other threads
  // release meanwhile may belong to later work of the device. What they take meanwhile is not what
  // this call frees: nobody comes between that and its own look.
  std::uintptr_t reclaim_and_take(std::int64_t bytes) {
    std::vector<Range> before;
    {
      const std::lock_guard lock(mutex_);
      const std::uintptr_t found = take_free(bytes);  // another thread may have freed some
      if (found != 0 || closed_ || released_.empty()) return found;
      before.swap(released_);
    }
    bool unused = false;
    try {
      unused = wait_();
    } catch (...) {
      put_back(before);
      throw;
    }
    if (!unused) {
      put_back(before);
      return 0;
    }
    const std::lock_guard lock(mutex_);
    for (const Range& range : before) free_.give(range);
    return take_free(bytes);
  }

  void put_back(const std::vector<Range>& ranges) {
    const std::lock_guard lock(mutex_);
    released_.insert(released_.end(), ranges.begin(), ranges.end());
  }

  const std::uintptr_t begin_;
  const std::int64_t bytes_;
  const Wait wait_;
  const unsigned forks_ = current_forks();
  std::mutex reclaiming_;  // by the one thread that waits for the device; before mutex_
  mutable std::mutex mutex_;
  bool closed_ = false;  // changes with both
  FreeRanges free_;      // offsets
  std::map<std::uintptr_t, Range> used_;
  std::vector<Range> released_;
};

}  // namespace pycomm::cpu

// Which parts of a device's memory are free, for tensors in a rank's CUDA window. It works with
// addresses, and touches none of the memory. Thread-safe. It needs no interpreter, so allocators of
// other libraries may call it while they hold their locks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
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
  DeviceHeap(std::uintptr_t begin, std::int64_t bytes, Wait wait) : wait_(std::move(wait)) {
    extend(begin, bytes);
  }

  // Adds memory. Blocks never reach from one part of the heap into another, even if these are neighbours.
  void extend(std::uintptr_t begin, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    parts_.push_back({begin, bytes, FreeRanges({0, bytes}, kUnit)});
  }

  // Takes the first free range that is large enough, and returns its address. If there is none, and
  // `may_wait`, first frees what was released, for which it waits for the device. Returns 0 if
  // there is no room. Zero bytes take a unit, too.
  std::uintptr_t take(std::int64_t bytes, bool may_wait) {
    {
      const std::lock_guard lock(mutex_);
      if (const std::uintptr_t found = take_free(bytes); found != 0 || !may_wait) return found;
    }
    return look_twice([&] { return take_free(bytes); });
  }

  // True if a free range has so many bytes. Waits for the device as take() does.
  bool has_room(std::int64_t bytes) {
    return look_twice([&] { return !closed_ && largest() >= bytes; });
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
    if (forks_ != current_forks()) return false;  // as in release()
    const std::lock_guard lock(mutex_);
    return std::any_of(parts_.begin(), parts_.end(), [&](const Part& part) {
      return address - part.begin < static_cast<std::uintptr_t>(part.bytes);
    });
  }

  // Why there is no room.
  std::string refusal(std::int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    if (closed_) return "the group is closed: the heap of its CUDA window makes no more tensors";
    std::int64_t whole = 0, free = 0;
    for (const Part& part : parts_) {
      whole += part.bytes;
      free += part.free.total();
    }
    return "the CUDA window's heap has no room for " + std::to_string(bytes) + " bytes: of " +
           std::to_string(whole) + " bytes " + std::to_string(free) +
           " are free, the largest block has " + std::to_string(largest()) +
           ": make the group with a larger cuda_heap_bytes";
  }

 private:
  struct Part {
    std::uintptr_t begin;
    std::int64_t bytes;
    FreeRanges free;  // offsets
  };
  struct Block {
    Part* part;
    Range range;
  };

  // With mutex_.
  std::uintptr_t take_free(std::int64_t bytes) {
    for (Part& part : parts_) {
      const auto found = closed_ ? std::nullopt : part.free.take(bytes);
      if (!found) continue;
      const std::uintptr_t address = part.begin + static_cast<std::uintptr_t>(found->begin);
      used_[address] = {&part, *found};
      return address;
    }
    return 0;
  }

  // With mutex_.
  std::int64_t largest() const {
    std::int64_t bytes = 0;
    for (const Part& part : parts_) bytes = std::max(bytes, part.free.largest());
    return bytes;
  }

  // Looks for something, and unless it is there, frees what was released before this call and looks
  // again; frees nothing if an operation has failed. What other threads release meanwhile may belong to
  // later work of the device. What they take meanwhile is not what this call frees: nobody comes
  // between that and its own look. look() is called with mutex_.
  template <class Look>
  auto look_twice(const Look& look) -> decltype(look()) {
    const std::lock_guard one_at_a_time(reclaiming_);
    std::vector<Block> before;
    {
      const std::lock_guard lock(mutex_);
      const auto found = look();  // another thread may have freed some
      if (found || closed_ || released_.empty()) return found;
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
      return {};
    }
    const std::lock_guard lock(mutex_);
    for (const Block& block : before) block.part->free.give(block.range);
    return look();
  }

  void put_back(const std::vector<Block>& blocks) {
    const std::lock_guard lock(mutex_);
    released_.insert(released_.end(), blocks.begin(), blocks.end());
  }

  const Wait wait_;
  const unsigned forks_ = current_forks();
  std::mutex reclaiming_;  // by the one thread that waits for the device; before mutex_
  mutable std::mutex mutex_;
  bool closed_ = false;  // changes with both
  std::deque<Part> parts_;
  std::map<std::uintptr_t, Block> used_;
  std::vector<Block> released_;
};

}  // namespace pycomm::cpu

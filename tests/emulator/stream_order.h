// Finds accesses of one piece of memory by two streams that nothing orders: a missing wait, or a missing
// record_stream(). Streams do their work at once here, so results alone would not show it. Each
// stream has a vector clock (Mattern 1989), and events carry clocks. All threads of the host share
// one, so it trusts the host too much. A strided tensor counts as all that lies between its ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

// A device and a stream of it.
using Line = std::pair<int, std::int64_t>;

class StreamOrder {
 public:
  // Work begins on a stream, after all that the host has seen the end of.
  void begin(Line stream) {
    const std::lock_guard lock(mutex_);
    join(clocks_[stream], host_);
    ++clocks_[stream][stream];
  }
  void record(const void* event, Line stream) {
    const std::lock_guard lock(mutex_);
    join(clocks_[stream], host_);
    events_[event] = clocks_[stream];
  }
  void wait(Line stream, const void* event) {
    const std::lock_guard lock(mutex_);
    join(clocks_[stream], events_[event]);
  }
  // Later work of a stream waits for what is enqueued on another one.
  void follow(Line stream, Line other) {
    const std::lock_guard lock(mutex_);
    join(clocks_[stream], clocks_[other]);
  }
  void host_waits(Line stream) {
    const std::lock_guard lock(mutex_);
    join(host_, clocks_[stream]);
  }
  void host_waits_for_all(int device) {
    const std::lock_guard lock(mutex_);
    for (const auto& [line, clock] : clocks_) {
      if (line.first == device) join(host_, clock);
    }
  }
  void host_waits(const void* event) {
    const std::lock_guard lock(mutex_);
    join(host_, events_[event]);
  }
  void forget(const void* event) {
    const std::lock_guard lock(mutex_);
    events_.erase(event);
  }

  void allocated(const void* memory, std::size_t bytes, Line stream) {
    const std::lock_guard lock(mutex_);
    allocations_[memory] = {static_cast<std::int64_t>(bytes), stream, {}, {}};
  }
  // The work that has begun on a stream reads or writes a piece of an allocation.
  void access(const void* memory, std::int64_t begin, std::int64_t end, Line stream, bool writes,
              const std::string& work) {
    const std::lock_guard lock(mutex_);
    std::vector<Access>& accesses = allocations_[memory].accesses;
    const Clock& now = clocks_[stream];
    for (const Access& other : accesses) {
      if (other.begin < end && begin < other.end && (writes || other.writes) &&
          !precedes(other, now)) {
        fail(work, stream, other);
      }
    }
    // What has been found to be in order is implied by what comes now.
    std::erase_if(accesses, [&](const Access& other) {
      return begin <= other.begin && other.end <= end &&
             (writes || (!other.writes && other.stream == stream));
    });
    accesses.push_back({begin, end, stream, now.at(stream), writes, work});
  }
  // The device of the allocation at an address; -1 if there is none.
  int device_at(std::int64_t address) {
    const std::lock_guard lock(mutex_);
    auto found = allocations_.upper_bound(reinterpret_cast<const void*>(address));
    if (found == allocations_.begin()) return -1;
    --found;
    const std::int64_t begin = address - reinterpret_cast<std::int64_t>(found->first);
    return begin < found->second.bytes ? found->second.stream.first : -1;
  }
  // The same for a number that may be the address of something that a kernel uses.
  void access_at(std::int64_t address, Line stream, bool writes, const std::string& work,
                 std::int64_t bytes = 1) {
    if (device_at(address) < 0) return;
    std::unique_lock lock(mutex_);
    const void* const memory =
        std::prev(allocations_.upper_bound(reinterpret_cast<const void*>(address)))->first;
    lock.unlock();
    const std::int64_t begin = address - reinterpret_cast<std::int64_t>(memory);
    access(memory, begin, begin + bytes, stream, writes, work);
  }
  // The memory goes to its stream's next allocation, but waits for streams that are recorded.
  void recorded(const void* memory, Line stream) {
    const std::lock_guard lock(mutex_);
    if (memory != nullptr) allocations_[memory].recorded.insert(stream);
  }
  void freed(const void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(memory);
    if (found == allocations_.end()) return;
    Clock now = clocks_[found->second.stream];
    join(now, host_);
    for (const Line& recorded : found->second.recorded) join(now, clocks_[recorded]);
    for (const Access& access : found->second.accesses) {
      if (!precedes(access, now)) fail("to free", found->second.stream, access);
    }
    allocations_.erase(found);
  }

 private:
  using Clock = std::map<Line, std::uint64_t>;
  struct Access {
    std::int64_t begin, end;
    Line stream;
    std::uint64_t at;  // the stream's clock
    bool writes;
    std::string work;
  };
  struct Allocation {
    std::int64_t bytes = 0;
    Line stream;
    std::vector<Access> accesses;
    std::set<Line> recorded;
  };

  static void join(Clock& clock, const Clock& other) {
    for (const auto& [line, at] : other) clock[line] = std::max(clock[line], at);
  }
  static bool precedes(const Access& access, const Clock& now) {
    const auto found = now.find(access.stream);
    return found != now.end() && access.at <= found->second;
  }
  [[noreturn]] static void fail(const std::string& work, Line stream, const Access& other) {
    std::fprintf(stderr,
                 "%s on stream %d:%lld is not ordered after %s on stream %d:%lld, which %s the "
                 "same memory\n",
                 work.c_str(), stream.first, static_cast<long long>(stream.second),
                 other.work.c_str(), other.stream.first,
                 static_cast<long long>(other.stream.second), other.writes ? "writes" : "reads");
    std::abort();
  }

  std::mutex mutex_;
  Clock host_;
  std::map<Line, Clock> clocks_;
  std::map<const void*, Clock> events_;
  std::map<const void*, Allocation> allocations_;
};

}  // namespace emulator

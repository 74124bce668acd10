// What a rank is waiting for in another of its groups, in shared memory.
#pragma once

#include <atomic>
#include <optional>

#include "core/operation.h"

namespace pycomm::cpu {

struct Wait {
  int rank;  // the awaited rank, as numbered in that group
  int pid;
  Collective collective;
  std::uint32_t ordinal;
  std::uint32_t group;      // Window::id
  bool failed;              // the wait has ended without success
  std::uint32_t completed;  // operations of this group that had succeeded when it was written
};

// Zero-initialised. One process writes, under a lock; all processes read.
class SharedWait {
 public:
  void write(const Wait& wait) {
    what_ = 0;
    completed_ = wait.completed;
    where_ = static_cast<std::uint64_t>(wait.pid) << 32 | wait.group;
    what_ = std::uint64_t{1} << 63 | static_cast<std::uint64_t>(wait.failed) << 62 |
            static_cast<std::uint64_t>(wait.collective) << 52 |
            static_cast<std::uint64_t>(wait.rank) << 32 | wait.ordinal;
  }
  void clear() { what_ = 0; }

  // Empty if the rank waits for nothing, or if the value is not valid.
  std::optional<Wait> read() const {
    const std::uint64_t what = what_, where = where_;
    const std::uint32_t completed = completed_;
    if (what == 0 || what != what_) return {};
    const auto collective = static_cast<Collective>(what >> 52 & 0xff);
    if (!is_known(collective)) return {};
    return Wait{static_cast<int>(what >> 32 & kField),
                static_cast<int>(where >> 32),
                collective,
                static_cast<std::uint32_t>(what),
                static_cast<std::uint32_t>(where),
                (what >> 62 & 1) != 0,
                completed};
  }

 private:
  std::atomic<std::uint64_t> what_, where_;
  std::atomic<std::uint32_t> completed_;
};

}  // namespace pycomm::cpu

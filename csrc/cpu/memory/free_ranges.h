// Which parts of a heap are free. It hands out ranges of offsets and touches no memory, so heaps in
// any memory can use it. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

#include "core/errors.h"
#include "core/layout.h"
#include "core/types.h"

namespace pycomm::cpu {

class FreeRanges {
 public:
  // All of `whole` is free. Sizes are rounded up to multiples of `unit`.
  FreeRanges(const Range& whole, std::int64_t unit) : unit_(unit) {
    if (whole.count > 0) free_[whole.begin] = whole.count;
  }

  // Takes the first free range that is large enough, if there is one. Zero bytes take a unit, too.
  std::optional<Range> take(std::int64_t bytes) {
    PYCOMM_CHECK(bytes >= 0, "bytes must not be negative, got " + std::to_string(bytes));
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [offset, room] = *range;
      if (room < bytes) continue;  // before rounding, which could overflow
      const std::int64_t size = round_up(bytes > 0 ? bytes : 1, unit_);
      if (room < size) continue;
      free_.erase(range);
      if (room > size) free_[offset + size] = room - size;
      return Range{offset, size};
    }
    return std::nullopt;
  }

  // Gives back a range that take() has returned, and merges it with its free neighbours.
  void give(Range range) {
    auto next = free_.lower_bound(range.begin);
    if (next != free_.end() && next->first == range.begin + range.count) {
      range.count += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == range.begin) {
        before->second += range.count;
        return;
      }
    }
    free_[range.begin] = range.count;
  }

  // Bytes of all free ranges, and of the largest one.
  std::int64_t total() const {
    std::int64_t bytes = 0;
    for (const auto& [offset, room] : free_) bytes += room;
    return bytes;
  }
  std::int64_t largest() const {
    std::int64_t bytes = 0;
    for (const auto& [offset, room] : free_) bytes = std::max(bytes, room);
    return bytes;
  }

 private:
  const std::int64_t unit_;
  std::map<std::int64_t, std::int64_t> free_;  // offset -> bytes
};

}  // namespace pycomm::cpu

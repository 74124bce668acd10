// What a rank's operations have taken since its group began: how many there were of each kind and
// size, and how their times are distributed. It costs a few stores per operation. One thread at a
// time adds, while any thread of the process reads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/operation.h"

namespace pycomm::cpu {

// Times are ticks, counted in buckets that are an eighth of a power of two wide: the middle of a
// bucket is at most 6 % from any time in it.
inline constexpr int kBuckets = 368;  // up to 2^48 ticks
constexpr int bucket_of(std::int64_t ticks) {
  if (ticks < 8) return static_cast<int>(std::max<std::int64_t>(ticks, 0));
  const int shift = std::bit_width(static_cast<std::uint64_t>(ticks)) - 4;
  return std::min(8 * shift + static_cast<int>(ticks >> shift), kBuckets - 1);
}
constexpr double middle_of(int bucket) {
  if (bucket < 8) return bucket;
  const std::int64_t width = std::int64_t{1} << (bucket / 8 - 1);
  return static_cast<double>((bucket % 8 + 8) * width) + static_cast<double>(width - 1) / 2;
}

struct Times {
  std::int64_t ticks;                                  // their sum
  std::vector<std::pair<int, std::uint64_t>> buckets;  // the number of times in each that has any
};

// The operations of a kind whose tensors have at least `size` and less than twice `size` bytes; 0:
// no bytes.
struct CountedOperations {
  Collective collective;
  CodecKind codec;
  std::int64_t size;
  std::uint64_t count, bytes;
  Times whole, exchange;
};

class Counters {
 public:
  Counters() = default;
  ~Counters() {
    for (const auto& cell : cells_) delete cell.load();
  }
  Counters(const Counters&) = delete;
  Counters& operator=(const Counters&) = delete;

  // The ticks at which a rank came to an operation, at which all ranks had come, and at which it
  // ended. The first two are the same if the rank has not waited for others for long.
  struct Moments {
    std::int64_t entered, arrived, done;
  };
  // Counts an operation. Its times count `weight` times; 0: it has none.
  void add(const Operation& operation, std::int64_t bytes, std::int64_t weight,
           const Moments& moments) {
    std::atomic<Cell*>& place = cells_[index_of(operation, bytes)];
    Cell* cell = place.load(std::memory_order_relaxed);
    if (cell == nullptr) {
      cell = new (std::nothrow) Cell;
      if (cell == nullptr) return;  // the operation has succeeded all the same
      place.store(cell, std::memory_order_release);
    }
    increase(cell->count, 1);
    increase(cell->bytes, bytes);
    if (weight == 0) return;
    if (moments.arrived == moments.entered) {
      cell->unwaited.add(moments.done - moments.entered, weight);
    } else {
      cell->whole.add(moments.done - moments.entered, weight);
      cell->exchange.add(moments.done - moments.arrived, weight);
    }
  }

  std::vector<CountedOperations> read() const {
    std::vector<CountedOperations> all;
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      const Cell* const cell = cells_[i].load(std::memory_order_acquire);
      if (cell == nullptr) continue;
      const std::size_t width = i % kSizes, kind = i / kSizes;
      all.push_back({static_cast<Collective>(kind / kCodecs),
                     static_cast<CodecKind>(kind % kCodecs),
                     width == 0 ? 0 : std::int64_t{1} << (width - 1),
                     static_cast<std::uint64_t>(cell->count.load(std::memory_order_relaxed)),
                     static_cast<std::uint64_t>(cell->bytes.load(std::memory_order_relaxed)),
                     read(cell->unwaited, cell->whole), read(cell->unwaited, cell->exchange)});
    }
    return all;
  }

 private:
  using Counter = std::atomic<std::int64_t>;
  static void increase(Counter& counter, std::int64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }

  struct Distribution {
    Counter ticks{0};
    Counter buckets[kBuckets] = {};

    void add(std::int64_t time, std::int64_t weight) {
      increase(ticks, time * weight);
      increase(buckets[bucket_of(time)], weight);
    }
  };
  // An operation without a long wait changes only one cache line, and one bucket.
  struct alignas(kLine) Cell {
    Counter count{0}, bytes{0};
    Distribution unwaited;         // of operations without a long wait, whose two times are one
    Distribution whole, exchange;  // of the others
  };
  static Times read(const Distribution& a, const Distribution& b) {
    const auto sum = [](const Counter& x, const Counter& y) {
      return x.load(std::memory_order_relaxed) + y.load(std::memory_order_relaxed);
    };
    Times times{sum(a.ticks, b.ticks), {}};
    for (int i = 0; i < kBuckets; ++i) {
      const std::int64_t n = sum(a.buckets[i], b.buckets[i]);
      if (n > 0) times.buckets.emplace_back(i, n);
    }
    return times;
  }

  static constexpr std::size_t kCodecs = kCountOf<CodecKind>, kSizes = 56;
  static std::size_t index_of(const Operation& operation, std::int64_t bytes) {
    const auto kind = static_cast<std::size_t>(operation.collective) * kCodecs +
                      static_cast<std::size_t>(operation.codec.kind);
    const auto width = static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(bytes)));
    return kind * kSizes + std::min(width, kSizes - 1);
  }

  std::array<std::atomic<Cell*>, kCountOf<Collective> * kCodecs * kSizes> cells_ = {};
};

}  // namespace pycomm::cpu

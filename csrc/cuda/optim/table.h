// The table of segments that kernels read.
//
//   | segments, field by field | first tiles, and the end | tickets | terms of sums | ratios |
//    <-------------------- written by the host ----------->
//
// The order is field by field, so that gradient pointers, which change often, are neighbours. Tickets
// are zero between launches: the warp that takes the last one resets it.
#pragma once

#include "core/optim/segment.h"
#include "core/optim/square_sum.h"
#include "cuda/layout.h"
#include "cuda/optim/step.h"

namespace pycomm::cuda {

inline constexpr std::int64_t kFields = sizeof(Segment) / 8;
// Threads of a block: few enough that three blocks with 80 registers per thread fit into an SM. Then
// the elements that a block takes at a time, and those of each warp.
inline constexpr int kStepThreads = 256;
inline constexpr std::int64_t kTile = 2048, kRun = kTile / (kStepThreads / 32);
inline constexpr std::int64_t kTileSums = kTile / kSumBlock;

// A segment without elements has a tile, too, so that it takes part in sums.
PYCOMM_HD constexpr std::int64_t tiles_of(std::int64_t count) {
  return count == 0 ? 1 : ceil_div(count, kTile);
}

// Where the sums of trees with fan-in 1024 (core/optim/square_sum.h) lie: terms on levels 0 to 2, and
// the tickets of their sums on levels 1 to 3. Trees follow one another on every level without overlap,
// because ceil(n / 1024) is at most floor(n / 1024) + 1.
struct Forest {
  static constexpr int kLevels = 3;
  std::int64_t leaves, trees;

  PYCOMM_HD constexpr std::int64_t begin(int level) const {
    std::int64_t sum = 0;
    for (int l = 0; l < level; ++l) sum += (leaves >> 10 * l) + trees;
    return sum;
  }
  PYCOMM_HD constexpr std::int64_t place(int level, std::int64_t first, std::int64_t tree) const {
    return begin(level) + (first >> 10 * level) + tree;
  }
  PYCOMM_HD constexpr std::int64_t terms() const { return begin(kLevels); }
  // There are no tickets on level 0.
  PYCOMM_HD constexpr std::int64_t tickets() const { return begin(kLevels + 1) - begin(1); }
};

struct Table {
  std::uint64_t* words;
  std::int64_t segments, tiles;

  PYCOMM_HD Forest forest() const { return {tiles * kTileSums, segments}; }  // within segments
  PYCOMM_HD Forest totals() const { return {segments, 1}; }                  // over them
  PYCOMM_HD std::int64_t tickets_at() const { return kFields * segments + segments + 1; }
  PYCOMM_HD std::int64_t tickets() const { return 1 + forest().tickets() + totals().tickets(); }
  PYCOMM_HD std::int64_t written() const { return tickets_at() + ceil_div(tickets(), 2); }
  // LAMB needs two sums per term.
  PYCOMM_HD std::int64_t ratios_at() const {
    return written() + 2 * (forest().terms() + totals().terms());
  }
  PYCOMM_HD std::int64_t size() const { return ratios_at() + segments; }

  PYCOMM_HD std::uint64_t field(int number, std::int64_t segment) const {
    return words[number * segments + segment];
  }
  PYCOMM_HD Segment segment(std::int64_t s) const {
    std::uint64_t fields[kFields];
    for (int f = 0; f < kFields; ++f) fields[f] = field(f, s);
    return bit_cast<Segment>(fields);
  }
  PYCOMM_HD std::int64_t first_tile(std::int64_t segment) const {
    return static_cast<std::int64_t>(words[kFields * segments + segment]);
  }
  // The segment in [low, high) that a tile belongs to.
  PYCOMM_HD std::int64_t segment_at(std::int64_t tile, std::int64_t low, std::int64_t high) const {
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first_tile(middle) <= tile ? low : high) = middle;
    }
    return low;
  }
  PYCOMM_HD std::uint32_t* step_ticket() const {
    return reinterpret_cast<std::uint32_t*>(words + tickets_at());
  }
  PYCOMM_HD double* terms() const { return reinterpret_cast<double*>(words + written()); }
  PYCOMM_HD double* ratios() const { return reinterpret_cast<double*>(words + ratios_at()); }
};

// With the learning rate in device memory, if there is one.
PYCOMM_HD Settings settings_now(Settings settings, const void* lr, bool lr_is_double) {
  if (lr != nullptr) {
    settings.lr = lr_is_double ? *static_cast<const double*>(lr) : *static_cast<const float*>(lr);
  }
  return settings;
}

}  // namespace pycomm::cuda

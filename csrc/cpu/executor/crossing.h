// The floor of a collective in shared memory: the bytes that must cross between the caches of the
// ranks, and the flags that say that they are there, without arithmetic and without a group.
//
// A tensor of N bytes has a part for each of n ranks. Ordinary tensors are private, so their bytes
// cross through slots that all ranks can read. Every rank
//   one_shot:       (all-reduce) writes N bytes to its slot, and reads the slots of all others;
//   two_shot:       (all-reduce) writes to its slot the (n - 1) / n of N that others own, reads what
//                   it owns from all others, writes that to its slot, and reads the rest from the
//                   others' slots;
//   reduce_scatter: is the first half of two_shot: N / n come from each of the others;
//   all_gather:     is the second half: writes its N / n to its slot, and reads the rest from the
//                   others' slots;
//   broadcast:      reads N bytes from the root's slot, after the root has written them.
// All but one_shot go tile by tile, so that slots stay in caches. They write a tile ahead of those
// that they read, so that ranks wait little; a broadcast's root writes up to four ahead.
//
// Tensors in windows need no slots, because all ranks can read and write them. Every rank
//   two_shot_window:       reads what it owns from the tensors of all others, and writes it to all;
//   reduce_scatter_window: reads what it owns from the tensors of all others;
//   all_gather_push:       writes its part to all tensors;
//   all_gather_pull:       reads the parts of all, its own, too;
//   broadcast_pull:        reads the root's tensor;
//   broadcast_share:       copies its part of the root's tensor to all others, so that the root works
//                          as much as they do. With two ranks each copies half of the tensor.
//
// A sum also needs the rank's own part, which crosses nothing, so no route reads it. For tensors
// larger than the caches, reading it takes time, and these routes are a low floor.
// Where a collective adds, part p gets the bytes of the rank before p, so that it can be checked.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "cpu/executor/loops.h"
#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

enum class Route {
  one_shot,
  two_shot,
  reduce_scatter,
  all_gather,
  broadcast,
  two_shot_window,
  reduce_scatter_window,
  all_gather_push,
  all_gather_pull,
  broadcast_pull,
  broadcast_share,
};

class Crossing {
 public:
  using Flag = std::atomic<std::uint32_t>;
  static constexpr std::int64_t kFlagBytes = 2 * kLine;
  // Tiles in a slot. A rank that writes tile t has seen that the others have written t - 2, which
  // they do after they have read t - 4. A broadcast's root waits until all have taken t - 4.
  static constexpr std::uint32_t kTurns = 4;

  // A rank's memory as it is mapped here.
  struct Place {
    Flag* flags;      // kFlagBytes, zero at first
    std::byte* slot;  // kTurns tiles; for tensors in windows the tensor that others read or write
  };

  // `bytes` is the size of the whole tensor. It and `tile` are multiples of the number of ranks.
  Crossing(Route route, std::vector<Place> places, int rank, std::int64_t bytes, std::int64_t tile);

  // All ranks call this together. Throws std::runtime_error if another rank has not come within the
  // timeout.
  void run(const std::byte* input, std::byte* output, Clock::duration timeout);

 private:
  enum Step { kGiven, kTaken };  // what a flag counts

  int ranks() const { return static_cast<int>(places_.size()); }
  std::byte* slot(int rank) const { return places_[static_cast<std::size_t>(rank)].slot; }
  // Part p of a tile in a rank's slot. Tiles take turns, because others may still read earlier
  // tiles.
  std::byte* place(int rank, std::uint32_t turn, int part) const;

  void cross_whole(const std::byte* input, std::byte* output);
  void cross_tiles(const std::byte* input, std::byte* output);
  void cross_from_root(const std::byte* input, std::byte* output);
  void cross_windows(const std::byte* input, std::byte* output);

  // The steps of cross_tiles(). `at` is where the tile begins in every part.
  void give(const std::byte* input, std::byte* output, std::int64_t at, std::uint32_t turn);
  void take_owned(std::byte* output, std::int64_t at, std::uint32_t turn);
  void take_rest(std::byte* output, std::int64_t at, std::uint32_t turn) const;
  // The step of cross_windows().
  void cross_window_tile(const std::byte* input, std::byte* output, std::int64_t at);

  // Reads from(r) of all other ranks r, and keeps the data of the rank before this one.
  template <class From>
  void read_others(Target to, From from, std::int64_t bytes);
  std::int64_t length(std::int64_t at) const { return std::min(tile_part_, part_ - at); }

  void say(Step step);
  void await(int rank, Step step, std::uint32_t count) const;
  void await_all(Step step, std::uint32_t count) const;
  Flag& flag(int rank, Step step) const;

  const Route route_;
  const std::vector<Place> places_;
  const int rank_;
  const std::int64_t bytes_, tile_;
  const std::int64_t part_, tile_part_;  // bytes of a rank's part of these
  const bool stream_;                    // the output will not be read soon
  std::vector<std::byte> scratch_;
  std::uint32_t said_[2] = {};
  Clock::duration timeout_ = {};
};

}  // namespace pycomm::cpu

// The floor of an all-reduce in shared memory: the bytes that must cross between the caches of the
// ranks, and the flags that say that they are there, without arithmetic and without a group.
//
// Of n ranks with N bytes each, every rank
//   one_shot: writes N bytes to its slot, and reads the slots of all others;
//   two_shot: writes to its slot the (n - 1) / n of N that others own, reads what it owns from all
//             others, writes that to its slot, and reads the rest from the others' slots; tile by
//             tile, so that slots stay in caches, and one tile ahead, so that ranks wait little;
//   window:   reads what it owns from the tensors of all others, and writes it to all tensors.
// The element that part p of the result gets is the one of the rank before p, so that it can be
// checked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "cpu/store_policy.h"

namespace pycomm::cpu {

enum class Route { one_shot, two_shot, window };

class Crossing {
 public:
  using Flag = std::atomic<std::uint32_t>;
  static constexpr std::int64_t kFlagBytes = 2 * kLine;

  // A rank's memory as it is mapped here.
  struct Place {
    Flag* flags;      // kFlagBytes, zero at first
    std::byte* slot;  // slot_bytes(); for Route::window the rank's tensor
  };

  // `bytes` and `tile` are multiples of the number of ranks.
  Crossing(Route route, std::vector<Place> places, int rank, std::int64_t bytes, std::int64_t tile);

  static std::int64_t slot_bytes(Route route, std::int64_t bytes, std::int64_t tile);

  // All ranks call this together. Throws std::runtime_error if another rank has not come within the
  // timeout.
  void run(const std::byte* input, std::byte* output, Clock::duration timeout);

 private:
  enum Step { kGiven, kOwned };  // what a flag counts

  int ranks() const { return static_cast<int>(places_.size()); }
  // Part p of a tile in a rank's slot. Slots take turns, because others may still read.
  std::byte* place(int rank, std::uint32_t turn, int part) const;
  void cross_whole(const std::byte* input, std::byte* output);
  void cross_tiles(const std::byte* input, std::byte* output);
  void cross_window();
  void give(const std::byte* input, std::int64_t part, std::uint32_t turn);
  void take_owned(std::byte* output, std::int64_t part, std::uint32_t turn);
  void take_rest(std::byte* output, std::int64_t part, std::uint32_t turn) const;
  void say(Step step);
  void await(Step step, std::uint32_t count) const;
  Flag& flag(int rank, Step step) const;

  const Route route_;
  const std::vector<Place> places_;
  const int rank_;
  const std::int64_t bytes_, tile_;
  const bool stream_;  // the output will not be read soon
  std::vector<std::byte> scratch_;
  std::uint32_t said_[2] = {};
  Clock::duration timeout_ = {};
};

}  // namespace pycomm::cpu

#include "cpu/crossing.h"

#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/signal.h"
#include "cpu/loops.h"
#include "cpu/waiting.h"

namespace pycomm::cpu {
namespace {

constexpr std::uint32_t kSlots = 3;  // of two_shot: one is filled, one is reduced, one is read

}  // namespace

Crossing::Crossing(Route route, std::vector<Place> places, int rank, std::int64_t bytes,
                   std::int64_t tile)
    : route_(route),
      places_(std::move(places)),
      rank_(rank),
      bytes_(bytes),
      tile_(route == Route::one_shot ? bytes : tile),
      stream_(bytes >= kStreamedOutput) {
  PYCOMM_CHECK(rank >= 0 && rank < ranks(), "rank must be one of the places");
  PYCOMM_CHECK(bytes_ > 0 && tile_ > 0 && bytes_ % ranks() == 0 && tile_ % ranks() == 0,
               "bytes and tile must be positive multiples of the number of ranks");
  scratch_.resize(static_cast<std::size_t>(tile_));
}

std::int64_t Crossing::slot_bytes(Route route, std::int64_t bytes, std::int64_t tile) {
  return route == Route::window ? bytes : kSlots * (route == Route::one_shot ? bytes : tile);
}

void Crossing::run(const std::byte* input, std::byte* output, Clock::duration timeout) {
  timeout_ = timeout;
  if (route_ == Route::one_shot) return cross_whole(input, output);
  if (route_ == Route::two_shot) return cross_tiles(input, output);
  cross_window();
}

void Crossing::cross_whole(const std::byte* input, std::byte* output) {
  const std::uint32_t turn = said_[kGiven];
  copy({place(rank_, turn, 0), false}, input, bytes_);
  say(kGiven);
  await(kGiven, said_[kGiven]);
  for (int step = 1; step < ranks(); ++step) {
    const bool last = step == ranks() - 1;
    copy({last ? output : scratch_.data(), false}, place((rank_ + step) % ranks(), turn, 0),
         bytes_);
  }
}

void Crossing::cross_tiles(const std::byte* input, std::byte* output) {
  const std::uint32_t first = said_[kOwned];
  const auto part_at = [&](std::int64_t begin) {
    return std::min(tile_, bytes_ - begin) / ranks();
  };
  give(input, part_at(0), first);
  for (std::int64_t begin = 0, next = tile_; begin < bytes_; begin = next, next += tile_) {
    const std::uint32_t turn = said_[kOwned];
    if (next < bytes_) give(input + next, part_at(next), turn + 1);
    await(kGiven, turn + 1);
    take_owned(output + begin, part_at(begin), turn);
    await(kOwned, turn + 1);
    take_rest(output + begin, part_at(begin), turn);
  }
  stream_fence();
}

void Crossing::give(const std::byte* input, std::int64_t part, std::uint32_t turn) {
  for (int p = 0; p < ranks(); ++p) {
    if (p != rank_) copy({place(rank_, turn, p), false}, input + p * part, part);
  }
  say(kGiven);
}

void Crossing::take_owned(std::byte* output, std::int64_t part, std::uint32_t turn) {
  for (int step = 1; step < ranks(); ++step) {
    copy({scratch_.data(), false}, place((rank_ + step) % ranks(), turn, rank_), part);
  }
  copy({place(rank_, turn, rank_), false}, scratch_.data(), part);
  say(kOwned);
  copy({output + rank_ * part, stream_}, scratch_.data(), part);
}

void Crossing::take_rest(std::byte* output, std::int64_t part, std::uint32_t turn) const {
  for (int p = 0; p < ranks(); ++p) {
    if (p != rank_) copy({output + p * part, stream_}, place(p, turn, p), part);
  }
}

void Crossing::cross_window() {
  const std::int64_t part = bytes_ / ranks(), most = tile_ / ranks();
  const auto tensor = [&](int r) { return places_[static_cast<std::size_t>(r)].slot; };
  say(kGiven);
  await(kGiven, said_[kGiven]);
  for (std::int64_t at = 0; at < part; at += most) {
    const std::int64_t begin = rank_ * part + at, length = std::min(most, part - at);
    for (int step = 1; step < ranks(); ++step) {
      copy({scratch_.data(), false}, tensor((rank_ + step) % ranks()) + begin, length);
    }
    for (int r = 0; r < ranks(); ++r) copy({tensor(r) + begin, stream_}, scratch_.data(), length);
  }
  stream_fence();
  say(kOwned);
  await(kOwned, said_[kOwned]);
}

std::byte* Crossing::place(int rank, std::uint32_t turn, int part) const {
  std::byte* const slot = places_[static_cast<std::size_t>(rank)].slot;
  return slot + turn % kSlots * tile_ + part * (tile_ / ranks());
}

Crossing::Flag& Crossing::flag(int rank, Step step) const {
  return places_[static_cast<std::size_t>(rank)].flags[step * kLine / sizeof(Flag)];
}

void Crossing::say(Step step) { flag(rank_, step).store(++said_[step], std::memory_order_release); }

void Crossing::await(Step step, std::uint32_t count) const {
  const Clock::time_point end = Clock::now() + timeout_;
  for (int r = 0; r < ranks(); ++r) {
    for (int spins = 0; !has_come(flag(r, step), count); ++spins) {
      if (spins < kSpins) {
        pause_core();
        continue;
      }
      sched_yield();
      if (Clock::now() > end) throw std::runtime_error("another rank has not come in time");
    }
  }
}

}  // namespace pycomm::cpu

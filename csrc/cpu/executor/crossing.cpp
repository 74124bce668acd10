#include "cpu/executor/crossing.h"

#include <sched.h>

#include <stdexcept>
#include <utility>

#include "core/signal.h"
#include "cpu/executor/waiting.h"

namespace pycomm::cpu {
namespace {

constexpr int kRoot = 0;  // of broadcasts

std::int64_t output_bytes(Route route, std::int64_t bytes, std::int64_t part) {
  const bool scatters = route == Route::reduce_scatter || route == Route::reduce_scatter_window;
  return scatters ? part : bytes;
}

}  // namespace

Crossing::Crossing(Route route, std::vector<Place> places, int rank, std::int64_t bytes,
                   std::int64_t tile)
    : route_(route),
      places_(std::move(places)),
      rank_(rank),
      bytes_(bytes),
      tile_(tile),
      part_(bytes / ranks()),
      tile_part_(tile / ranks()),
      stream_(output_bytes(route, bytes, part_) >= kStreamedOutput) {
  PYCOMM_CHECK(
      rank >= 0 && rank < ranks(),
      "rank must be from 0 to " + std::to_string(ranks() - 1) + ", got " + std::to_string(rank));
  PYCOMM_CHECK(bytes_ > 0 && tile_ > 0 && bytes_ % ranks() == 0 && tile_ % ranks() == 0,
               "bytes and tile must be positive multiples of the number of ranks");
  PYCOMM_CHECK(route != Route::one_shot || tile_ == bytes_, "one_shot must have a single tile");
  scratch_.resize(static_cast<std::size_t>(tile_));
}

void Crossing::run(const std::byte* input, std::byte* output, Clock::duration timeout) {
  timeout_ = timeout;
  switch (route_) {
    case Route::one_shot:
      return cross_whole(input, output);
    case Route::two_shot:
    case Route::reduce_scatter:
    case Route::all_gather:
      return cross_tiles(input, output);
    case Route::broadcast:
      return cross_from_root(input, output);
    default:
      return cross_windows(input, output);
  }
}

void Crossing::cross_whole(const std::byte* input, std::byte* output) {
  const std::uint32_t turn = said_[kGiven];
  copy({place(rank_, turn, 0), false}, input, bytes_);
  say(kGiven);
  await_all(kGiven, turn + 1);
  read_others({output, false}, [&](int r) { return place(r, turn, 0); }, bytes_);
}

void Crossing::cross_tiles(const std::byte* input, std::byte* output) {
  std::uint32_t turn = said_[kGiven];
  give(input, output, 0, turn);
  for (std::int64_t at = 0; at < part_; at += tile_part_, ++turn) {
    if (at + tile_part_ < part_) give(input, output, at + tile_part_, turn + 1);
    await_all(kGiven, turn + 1);
    if (route_ != Route::all_gather) take_owned(output, at, turn);
    if (route_ == Route::two_shot) await_all(kTaken, turn + 1);
    if (route_ != Route::reduce_scatter) take_rest(output, at, turn);
  }
  stream_fence();
}

void Crossing::give(const std::byte* input, std::byte* output, std::int64_t at,
                    std::uint32_t turn) {
  if (route_ == Route::all_gather) {
    copy({place(rank_, turn, rank_), false}, input + at, length(at));
    say(kGiven);
    return copy({output + rank_ * part_ + at, stream_}, input + at, length(at));
  }
  for (int p = 0; p < ranks(); ++p) {
    if (p != rank_) copy({place(rank_, turn, p), false}, input + p * part_ + at, length(at));
  }
  say(kGiven);
}

void Crossing::take_owned(std::byte* output, std::int64_t at, std::uint32_t turn) {
  const auto from = [&](int r) { return place(r, turn, rank_); };
  if (route_ == Route::reduce_scatter) {
    return read_others({output + at, stream_}, from, length(at));
  }
  read_others({scratch_.data(), false}, from, length(at));
  copy({place(rank_, turn, rank_), false}, scratch_.data(), length(at));
  say(kTaken);
  copy({output + rank_ * part_ + at, stream_}, scratch_.data(), length(at));
}

void Crossing::take_rest(std::byte* output, std::int64_t at, std::uint32_t turn) const {
  for (int step = 1; step < ranks(); ++step) {
    const int p = (rank_ + step) % ranks();
    copy({output + p * part_ + at, stream_}, place(p, turn, p), length(at));
  }
}

void Crossing::cross_from_root(const std::byte* input, std::byte* output) {
  std::uint32_t turn = said_[kTaken];
  for (std::int64_t at = 0; at < bytes_; at += tile_, ++turn) {
    const std::int64_t bytes = std::min(tile_, bytes_ - at);
    if (rank_ == kRoot) {
      await_all(kTaken, turn + 1 - kTurns);
      copy({place(kRoot, turn, 0), false}, input + at, bytes);
      say(kGiven);
    } else {
      await(kRoot, kGiven, turn + 1);
      copy({output + at, stream_}, place(kRoot, turn, 0), bytes);
    }
    say(kTaken);
  }
  stream_fence();
}

void Crossing::cross_windows(const std::byte* input, std::byte* output) {
  say(kGiven);
  await_all(kGiven, said_[kGiven]);
  for (std::int64_t at = 0; at < part_; at += tile_part_) cross_window_tile(input, output, at);
  stream_fence();
  say(kTaken);
  await_all(kTaken, said_[kTaken]);
}

void Crossing::cross_window_tile(const std::byte* input, std::byte* output, std::int64_t at) {
  const std::int64_t bytes = length(at), mine = rank_ * part_ + at;
  const auto owned = [&](int r) { return slot(r) + mine; };
  const auto write_all = [&](const std::byte* from, int first) {
    for (int r = first; r < ranks(); ++r) copy({slot(r) + mine, stream_}, from, bytes);
  };
  switch (route_) {
    case Route::two_shot_window:
      read_others({scratch_.data(), false}, owned, bytes);
      return write_all(scratch_.data(), 0);
    case Route::reduce_scatter_window:
      return read_others({output + at, stream_}, owned, bytes);
    case Route::all_gather_push:
      return write_all(input + at, 0);
    case Route::broadcast_share:
      return write_all(slot(kRoot) + mine, kRoot + 1);
    default:
      break;
  }
  if (route_ == Route::broadcast_pull && rank_ == kRoot) return;
  for (int p = 0; p < ranks(); ++p) {
    const std::byte* const from =
        route_ == Route::all_gather_pull ? slot(p) : slot(kRoot) + p * part_;
    copy({output + p * part_ + at, stream_}, from + at, bytes);
  }
}

template <class From>
void Crossing::read_others(Target to, From from, std::int64_t bytes) {
  for (int step = 1; step < ranks(); ++step) {
    const bool last = step == ranks() - 1;
    copy(last ? to : Target{scratch_.data(), false}, from((rank_ + step) % ranks()), bytes);
  }
}

std::byte* Crossing::place(int rank, std::uint32_t turn, int part) const {
  return slot(rank) + turn % kTurns * tile_ + part * tile_part_;
}

Crossing::Flag& Crossing::flag(int rank, Step step) const {
  return places_[static_cast<std::size_t>(rank)].flags[step * kLine / sizeof(Flag)];
}

void Crossing::say(Step step) { flag(rank_, step).store(++said_[step], std::memory_order_release); }

void Crossing::await_all(Step step, std::uint32_t count) const {
  for (int r = 0; r < ranks(); ++r) await(r, step, count);
}

void Crossing::await(int rank, Step step, std::uint32_t count) const {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (has_come(flag(rank, step), count)) return;
    pause_core();
  }
  const Clock::time_point end = Clock::now() + timeout_;
  while (!has_come(flag(rank, step), count)) {
    sched_yield();
    if (Clock::now() > end) throw std::runtime_error("another rank did not take part in time");
  }
}

}  // namespace pycomm::cpu

// How a tensor is divided into stripes, which the ranks of a node exchange with the other nodes in
// parallel: rank i of each node carries stripe i. If a node has more ranks than others, the ranks
// beyond the last stripe carry nothing.
//
// EvenStripes and CyclicStripes describe chunks for the halves of two-shot
// (core/algorithms/two_shot.h): the owner of a chunk is the rank that carries it.
#pragma once

#include "core/algorithms/two_shot.h"
#include "core/layout.h"

namespace pycomm {

// Contiguous stripes, as even as boundaries at multiples of `unit` elements allow.
template <class Comm>
struct EvenStripes {
  Comm& comm;
  int stripes;
  std::int64_t unit;  // a multiple of comm.line()

  PYCOMM_HD std::int64_t piece() const {
    return comm.slot_count() / stripes / comm.line() * comm.line();
  }
  PYCOMM_HD Tiles tiles() const {
    const std::int64_t longest = part_of(comm.count(), stripes, 0, unit).count;
    return {longest, comm.zero_copy() ? longest : piece()};
  }
  PYCOMM_HD Chunk operator()(std::int64_t t, int owner) const {
    if (owner >= stripes) return {0, 0, 0, 0};
    const Range stripe = part_of(comm.count(), stripes, owner, unit);
    const std::int64_t done = t * tiles().size, rest = stripe.count - done;
    if (rest <= 0) return {0, 0, 0, 0};
    const std::int64_t begin = stripe.begin + done;
    return {begin, begin, owner * piece(), rest < tiles().size ? rest : tiles().size};
  }
};

// Interleaved stripes: every `length` elements the next stripe begins, and after the last one the
// first again. An element's stripe depends only on its index in the whole tensor.
struct StripeInterleave {
  std::int64_t length;
  int stripes;

  // The number of elements of stripe s among those before `index`.
  PYCOMM_HD constexpr std::int64_t before(std::int64_t index, int s) const {
    const std::int64_t section = index / length, stripe = section % stripes;
    const std::int64_t last = stripe > s ? length : stripe == s ? index % length : 0;
    return section / stripes * length + last;
  }
};

// The tiles of a tensor in interleaved stripes. A tile covers whole periods; a period is `length`
// elements of every stripe.
struct TileRanges {
  std::int64_t period;        // elements in a period
  std::int64_t first, count;  // the tensor's place in the whole tensor
  std::int64_t periods_per_tile;

  PYCOMM_HD constexpr std::int64_t first_period() const { return first / period; }
  PYCOMM_HD constexpr std::int64_t periods() const {
    return count == 0 ? 0 : ceil_div(first + count, period) - first_period();
  }
  PYCOMM_HD constexpr std::int64_t tiles() const { return ceil_div(periods(), periods_per_tile); }
  // The elements of tile t, as a range of the tensor.
  PYCOMM_HD constexpr Range operator[](std::int64_t t) const {
    const std::int64_t start = (first_period() + t * periods_per_tile) * period - first;
    const std::int64_t stop = start + periods_per_tile * period;
    const std::int64_t begin = start < 0 ? 0 : start, end = stop < count ? stop : count;
    return {begin, end - begin};
  }
};

// Interleaved stripes of one tensor. A tile holds one piece of every stripe.
template <class Comm>
struct CyclicStripes {
  Comm& comm;
  StripeInterleave interleave;
  std::int64_t offset;  // the tensor's first element in the whole tensor
  bool packed;          // the output holds only this rank's stripe, without gaps

  PYCOMM_HD std::int64_t piece() const {
    std::int64_t piece = interleave.length;
    while (piece % 2 == 0 && piece * interleave.stripes > comm.slot_count()) piece /= 2;
    return piece;
  }
  PYCOMM_HD Tiles tiles() const {
    const std::int64_t period = interleave.length * interleave.stripes;
    const std::int64_t periods = ceil_div(offset + comm.count(), period) - offset / period;
    return {comm.count() == 0 ? 0 : periods * (interleave.length / piece()), 1};
  }
  PYCOMM_HD Chunk operator()(std::int64_t t, int owner) const {
    if (owner >= interleave.stripes) return {0, 0, 0, 0};
    const std::int64_t size = piece(), pieces = interleave.length / size;
    const std::int64_t period = offset / (interleave.length * interleave.stripes) + t / pieces;
    const std::int64_t start =
        (period * interleave.stripes + owner) * interleave.length + t % pieces * size - offset;
    const std::int64_t begin = start < 0 ? 0 : start;
    const std::int64_t end = start + size < comm.count() ? start + size : comm.count();
    if (end <= begin) return {0, 0, 0, 0};
    const std::int64_t output =
        packed ? interleave.before(offset + begin, owner) - interleave.before(offset, owner)
               : begin;
    return {begin, output, owner * size, end - begin};
  }
};

}  // namespace pycomm

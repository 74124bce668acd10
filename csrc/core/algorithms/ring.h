// Ring all-reduce: reduce-scatter and all-gather around a ring, pipelined.
//
//   A tile is split into n chunks, and a chunk into pieces. At step s, rank r writes its copy of
//   chunk (r-s) mod n:
//     0            r's own contribution, unchanged;
//     1 .. n-2     the left neighbour's partial sum plus r's contribution;
//     n-1          the same, now complete: r owns chunk r+1;
//     n .. 2n-2    a copy of the left neighbour's complete chunk.
//   After each piece r signals. The right neighbour, one step behind, then processes that piece
//   while r makes the next one.
//
// Per rank, for S bytes: 2 (n-1)/n S read from the left neighbour and nothing from any other rank;
// 2n-1 signals per piece of a chunk (2(n-1) tell the neighbour that a piece is ready; the last one
// tells it that r has read everything).
// Chunk c is added in the order c, c+1, ..., c-1 (mod n) and rounded to the tensor's type at every
// hop. Reference: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations".
//
// Overwriting: r may replace a partial chunk with the complete one, because the complete chunk was
// built from that partial by way of the right neighbour, which has therefore read it. (The last
// chunk that r copies is the right neighbour's own, which it never needs from r.)
// Slots: those of tile t-2 are free once r has completed tile t-1, because every chunk of t-1 has
// passed through the right neighbour, which had read all of t-2 before.
#pragma once

#include "core/executor.h"
#include "core/layout.h"

namespace pycomm {

inline constexpr std::int64_t kRingPieceBytes = 64 << 10;

template <class Comm>
struct RingTile {
  Comm& comm;
  Range tile;
  Location mine;  // this rank's copy: a staging slot, or with zero copy the output
  Location left;  // the left neighbour's copy
  std::int64_t piece_count;
  std::int64_t pieces;

  PYCOMM_HD void step(int s, std::int64_t piece) const {
    const int n = comm.size();
    const Range chunk = part_of(tile.count, n, (comm.rank() - s + 2 * n) % n, comm.line());
    const Range part = Tiles{chunk.count, piece_count}[piece];
    if (part.count <= 0) return;
    const std::int64_t at = chunk.begin + part.begin;
    const Location here = comm.at(mine, at), there = comm.at(left, at);
    const Location in = comm.at(comm.input(), tile.begin + at);
    const Location out = comm.at(comm.output(), tile.begin + at);
    if (s == 0) {
      comm.copy(here, in, part.count);
    } else if (s < n) {
      const bool last = s == n - 1;
      comm.reduce(
          last && !comm.zero_copy() ? 2 : 1, [&](int i) { return i == 0 ? here : out; }, 2,
          [&](int i) { return i == 0 ? there : in; }, part.count, last);
    } else {
      // The right neighbour reads this copy, unless it owns the chunk itself.
      const Location kept = s < 2 * n - 2 ? here : out;
      comm.copy(kept, there, part.count);
      comm.copy(out, kept, part.count);
    }
  }
};

template <Executor Comm>
PYCOMM_HD void ring(Comm& comm) {
  comm.announce();
  const int n = comm.size(), me = comm.rank();
  const int left = (me + n - 1) % n, right = (me + 1) % n;
  const bool zero_copy = comm.zero_copy();
  const Tiles tiles{comm.count(), zero_copy ? comm.count() : comm.slot_count()};
  std::int64_t signalled = 0;

  for (std::int64_t t = 0; t < tiles.count(); ++t) {
    const Range range = tiles[t];
    const std::int64_t piece_count = comm.elements(kRingPieceBytes);
    const std::int64_t chunk_count = part_of(range.count, n, 0, comm.line()).count;
    const RingTile<Comm> tile{comm,
                              range,
                              zero_copy ? comm.output() : comm.slot(me, t % kStagingSlots),
                              zero_copy ? comm.output(left) : comm.slot(left, t % kStagingSlots),
                              piece_count,
                              ceil_div(chunk_count, piece_count)};
    for (int s = 0; s <= 2 * n - 2; ++s) {
      for (std::int64_t piece = 0; piece < tile.pieces; ++piece) {
        if (s > 0) comm.wait(left, kUp, signalled + 1 - tile.pieces);
        tile.step(s, piece);
        comm.signal(kUp);
        ++signalled;
      }
    }
  }
  if (zero_copy) comm.wait(right, kUp, signalled);
}

}  // namespace pycomm

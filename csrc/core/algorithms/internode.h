// Two-shot between machines, in rounds of messages. The tensor is a stripe (core/algorithms/stripes.h) and each
// machine is one rank of the exchange, so that every stripe crosses each machine's link once.
//
//   1. Stage: encode what the other machines own of a tile; send it to them, receive what they have
//      for the part that this machine owns.
//   2. Reduce: add the contributions in the order of machines; send the result to all.
//   3. Gather: decode what the other owners have sent.
//
// Reduce runs `kAhead` tiles behind stage, and gather as many behind reduce: while one tile is
// encoded, added or decoded, others are on the wire in both directions. All machines post their rounds
// in the same order, whatever the timing.
//
// Per stripe of S bytes on the wire and H machines, each sends and receives (H-1)/H S in phase 1 and
// again in phase 2. Reduce-scatter is phases 1 and 2 without the sending of results, all-gather and
// broadcast are the rest.
#pragma once

#include "core/layout.h"

namespace pycomm {

inline constexpr std::int64_t kAhead = 2;
// Tiles that are under way at a time.
inline constexpr std::int64_t kTilesUnderWay = 2 * kAhead + 1;

// A Link posts rounds, which are numbered, and waits for them. A Part is what one operation does:
// tiles(), reduces(), gathers(), stage(t), staged(t), reduce(t), reduced(t), meanwhile(t), gather(t), of
// which staged() and reduced() are the rounds; meanwhile() needs no other machine's result.
template <class Link, class Part>
void exchange(Link& link, Part& part) {
  std::int64_t staged[kTilesUnderWay]{}, reduced[kTilesUnderWay]{};
  const std::int64_t tiles = part.tiles();
  const auto in_range = [&](std::int64_t t) { return t >= 0 && t < tiles; };
  for (std::int64_t step = 0; step < tiles + 2 * kAhead; ++step) {
    if (const std::int64_t t = step; part.reduces() && in_range(t)) {
      part.stage(t);
      staged[t % kTilesUnderWay] = link.post(part.staged(t));
    }
    if (const std::int64_t t = step - kAhead; in_range(t)) {
      if (part.reduces()) {
        link.wait(staged[t % kTilesUnderWay]);
        part.reduce(t);
      }
      if (part.gathers()) reduced[t % kTilesUnderWay] = link.post(part.reduced(t));
      part.meanwhile(t);
    }
    if (const std::int64_t t = step - 2 * kAhead; part.gathers() && in_range(t)) {
      link.wait(reduced[t % kTilesUnderWay]);
      part.gather(t);
    }
  }
}

}  // namespace pycomm

// Two-shot between nodes, in batches of messages. The tensor is a stripe (core/algorithms/stripes.h) and each
// node is one rank of the exchange, so that every stripe crosses each node's link once.
//
//   1. Stage: encode what the other nodes own of a tile; send it to them, receive what they have
//      for the part that this node owns.
//   2. Reduce: add the contributions in the order of nodes; send the result to all.
//   3. Gather: decode what the other owners have sent.
//
// Reduce runs `kPipelineDepth` tiles behind stage, and gather as many behind reduce: while one tile is
// encoded, added or decoded, others are on the wire in both directions. All nodes post their batches
// in the same order, whatever the timing.
//
// Per stripe of S bytes on the wire and H nodes, each sends and receives (H-1)/H S in phase 1 and
// again in phase 2. Reduce-scatter is phases 1 and 2 without the sending of results, all-gather and
// broadcast are the rest.
#pragma once

#include "core/layout.h"

namespace pycomm {

inline constexpr std::int64_t kPipelineDepth = 2;
// Tiles that are under way at a time.
inline constexpr std::int64_t kTilesUnderWay = 2 * kPipelineDepth + 1;

// A Link posts batches, which are numbered, and waits for them. Stages are what one operation does:
// tiles(), reduces(), gathers(), stage(t), staged(t), reduce(t), reduced(t), meanwhile(t), gather(t), of
// which staged() and reduced() are the batches; meanwhile() needs no other node's result.
template <class Link, class Stages>
void exchange(Link& link, Stages& stages) {
  std::int64_t staged[kTilesUnderWay]{}, reduced[kTilesUnderWay]{};
  const std::int64_t tiles = stages.tiles();
  const auto in_range = [&](std::int64_t t) { return t >= 0 && t < tiles; };
  for (std::int64_t step = 0; step < tiles + 2 * kPipelineDepth; ++step) {
    if (const std::int64_t t = step; stages.reduces() && in_range(t)) {
      stages.stage(t);
      staged[t % kTilesUnderWay] = link.post(stages.staged(t));
    }
    if (const std::int64_t t = step - kPipelineDepth; in_range(t)) {
      if (stages.reduces()) {
        link.wait(staged[t % kTilesUnderWay]);
        stages.reduce(t);
      }
      if (stages.gathers()) reduced[t % kTilesUnderWay] = link.post(stages.reduced(t));
      stages.meanwhile(t);
    }
    if (const std::int64_t t = step - 2 * kPipelineDepth; stages.gathers() && in_range(t)) {
      link.wait(reduced[t % kTilesUnderWay]);
      stages.gather(t);
    }
  }
}

}  // namespace pycomm

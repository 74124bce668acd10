// Two-shot between nodes, in batches of messages. The tensor is one stripe
// (core/algorithms/stripes.h), and each node takes part as one rank. So every stripe crosses each
// node's network link once.
//
//   1. Stage: encode the parts of a tile that other nodes own and send them; receive the other
//      nodes' contributions to the part that this node owns.
//   2. Reduce: add the contributions in node order; send the result to all nodes.
//   3. Gather: decode the results that the other owners have sent.
//
// Reduce runs `kPipelineDepth` tiles behind stage, and gather runs `kPipelineDepth` tiles behind
// reduce. While one tile is encoded, added or decoded, others are on the wire in both directions.
// All nodes post their batches in the same order, independent of timing.
//
// In a batch, node m sends to the nodes m+1, m+2, ... (mod H) and receives from m-1, m-2, ...: nodes
// that are in step send to different ones, instead of all to the same.
//
// Per stripe of S bytes on the wire and H nodes, each node sends and receives (H-1)/H S in phase 1
// and again in phase 2. Reduce-scatter is phases 1 and 2 without sending the results; all-gather
// and broadcast are the rest.
#pragma once

#include "core/layout.h"

namespace pycomm {

inline constexpr std::int64_t kPipelineDepth = 2;
// The number of tiles in flight at a time.
inline constexpr std::int64_t kTilesUnderWay = 2 * kPipelineDepth + 1;

struct Partners {
  int to, from;
};
// Whom a node sends to and receives from at turn 1, 2, ..., nodes - 1.
constexpr Partners partners_at(int turn, int node, int nodes) {
  return {(node + turn) % nodes, (node - turn + nodes) % nodes};
}

// Link: post(batch) starts a batch of messages and returns its number; wait(number) waits for it.
// Stages: one operation's steps on tile t. reduces() and gathers() say which phases the operation
// has. stage(t), reduce(t) and gather(t) do the phases' work; staged(t) and reduced(t) return the
// batches to post. meanwhile(t) does work that needs no other node's result.
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

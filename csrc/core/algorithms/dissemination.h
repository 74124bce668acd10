// All-gather of small stripes between many nodes, in rounds of messages. Each node takes part as one
// rank (core/algorithms/internode.h), and its block is the whole stripe.
//
// At first node m holds its own block. In a round in which it holds h blocks, its own and those of the
// h-1 nodes after it, it sends them to the nodes m-h, m-2h and m-3h, and receives as many from m+h,
// m+2h and m+3h; the last round moves what is left. So a node sends H-1 blocks in about 3 log4 H
// messages, of which log4 H follow one another, where it would send them in H-1 messages at once.
// Then every node adds all blocks in node order, as if each had come straight from its node.
//
// With one partner per round there would be log2 H messages, all one after another. Three take half as
// many rounds for half as many messages more: less time, as long as a message takes longer to arrive
// than to send.
//
// Reference: Bruck, Ho, Kipnis, Upfal, Weathersby 1997, "Efficient algorithms for all-to-all
// communications in multiport message-passing systems".
#pragma once

#include <algorithm>

namespace pycomm {

inline constexpr int kRadix = 4;

// A message of a round, and the one that comes in its place. Blocks count from the node's own: block i
// is that of node m + i.
struct BlockMessage {
  int to, from;
  int blocks;    // sent, from block 0 on, and received
  int received;  // the first block received
};
// Message 1, ..., kRadix - 1 of the round in which a node holds so many blocks; without blocks if there
// are not so many nodes.
constexpr BlockMessage message_at(int message, int held, int node, int nodes) {
  const int first = std::min(message * held, nodes);
  return {(node + nodes - first) % nodes, (node + first) % nodes, std::min(held, nodes - first),
          first};
}

// Link: as in core/algorithms/internode.h, where wait() also takes how many nodes may have waited for
// each other before what it waits for is sent. Blocks: transfers(held) returns a round's batch.
template <class Link, class Blocks>
void disseminate(Link& link, Blocks& blocks) {
  int hops = 0;
  for (int held = 1; held < link.size(); held *= kRadix) {
    link.wait(link.post(blocks.transfers(held)), hops++);
  }
}

}  // namespace pycomm

// What ranks have done lately, as read from the records that they keep (cpu/record.h).
#pragma once

#include <string>
#include <vector>

#include "core/operation.h"

namespace pycomm {

// An operation that a rank has recorded. Times are seconds of the steady clock, which all processes
// of a machine share.
struct Recorded {
  Operation operation;
  std::uint32_t number;
  double entered;
  double done;          // 0: not yet, or it has failed; `entered` if it has not been timed
  std::string subject;  // what it is about, such as a bucket's parameters; may be empty
};

struct RankState {
  int rank = -1;
  int pid = -1;
  bool gone = false;               // it has left, or its process has ended
  int waits_for = -1;              // a rank
  std::string elsewhere;           // what it waits for in another group
  std::vector<Recorded> recorded;  // its last operations, in order
};

// What a rank knows of another node.
struct NodeState {
  int node;
  std::vector<int> ranks;
  int peer = -1;         // the rank there with which this one exchanges, if it does
  bool awaited = false;  // this rank waits for that one
  bool lost = false;     // the connection has ended without a word
  std::string told;      // why it stops, if it has said so
};

// The ranks of a group that are on this node and have joined, at a time of the steady clock.
struct GroupState {
  double time = 0;
  int size = 0;  // with ranks that have not joined
  bool failed = false;
  std::vector<RankState> ranks;
  std::vector<NodeState> nodes;  // the others
};

}  // namespace pycomm

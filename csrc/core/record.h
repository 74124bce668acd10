// What ranks have done lately, as read from the records that they keep (cpu/observe/record.h).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
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

// Words of core/signal.h: how far a rank's device is with what its host has launched, and which operation
// of a graph it has replayed last.
using DeviceProgress = std::array<std::uint64_t, 2>;

// An operation that a rank has launched on its device.
struct Launched {
  enum class State : std::uint8_t { launched, running, done };

  std::optional<Operation> operation;  // empty if newer ones have taken its record's place
  std::uint32_t number;
  bool captured;  // in a graph: `state` is that of its last replay
  State state;    // on the device
  double launched;
  // When this rank's host has first seen the state, perhaps in an earlier replay; `launched` if the device
  // has gone on, or has not begun.
  double since;
  std::string subject;
};

// An operation that a device has ended. Times are nanoseconds, up to the end.
struct TimedOperation {
  Collective collective;
  CodecKind codec;
  std::int64_t bytes;
  std::int64_t whole;     // since this rank had come
  std::int64_t exchange;  // since all ranks had
};

// Bytes of memory in the phases of training steps (pycomm/memory.py), each plus 1; 0 if it is not
// known.
using MemoryFigures = std::array<std::int64_t, 60>;

struct RankState {
  int rank = -1;
  int pid = -1;
  bool gone = false;               // it has left, or its process has ended
  int waits_for = -1;              // a rank
  std::string elsewhere;           // what it waits for in another group
  std::vector<Recorded> recorded;  // its last operations, in order
  std::vector<Launched> launched;  // those on its device, in order of launches
  MemoryFigures memory{};
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
  std::string name = {};         // of the group, in the process that asks
};

}  // namespace pycomm

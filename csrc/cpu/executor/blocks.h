// The blocks of a rank's tensors if they do not follow each other or differ in size (core/call.h).
#pragma once

#include <vector>

#include "core/call.h"

namespace pycomm::cpu {

class Comm;

struct BlockTable {
  // An entry per rank. `begin` is where the blocks are if they follow each other.
  BlockTable(const Blocks& blocks, const void* begin, const Operation& operation, int ranks);

  std::int64_t largest() const;

  std::vector<std::byte*> addresses;
  std::vector<std::int64_t> counts;  // elements of the operation's dtype
};

// The blocks of a call's input and output.
struct CallBlocks {
  CallBlocks(const Call& call, const Operation& operation, int ranks)
      : inputs(call.inputs, call.input, operation, ranks),
        outputs(call.outputs, call.output, operation, ranks) {}

  BlockTable inputs;
  BlockTable outputs;
};

// Why a call's blocks cannot be used; empty if they can, or if there are none.
std::string refusal_of_blocks(const Call& call, int ranks);

// Runs an operation whose tensors are given as blocks.
//
// For all-gather and reduce-scatter, every rank knows the size of every block. For all-to-all, a rank
// knows only what it sends and receives; the ranks first exchange these counts and compare them. If a
// rank expects another number of elements than is sent to it, all ranks throw the same mismatch.
void run_in_blocks(Comm& comm, Operation operation, const Call& call, void (*interrupt)());

}  // namespace pycomm::cpu

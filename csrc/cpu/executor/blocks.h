// The blocks of a rank's tensors if they do not follow each other or differ in size (core/call.h).
#pragma once

#include <optional>
#include <vector>

#include "core/call.h"
#include "core/errors.h"

namespace pycomm::cpu {

class Comm;

struct BlockTable {
  // An entry per rank. `begin` is where the blocks are if they follow each other.
  BlockTable(const Blocks& blocks, const void* begin, const Operation& operation, int ranks);

  std::int64_t largest() const;
  std::int64_t bytes(int rank, DType dtype) const {
    return counts[static_cast<std::size_t>(rank)] * size_of(dtype);
  }

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

// All ranks' counts in an all-to-all in which a rank knows only what it sends and expects.
class BlockCounts {
 public:
  // `all_gather` runs an all-gather among the ranks.
  template <class AllGather>
  BlockCounts(int ranks, const CallBlocks& blocks, AllGather all_gather)
      : ranks_(ranks), all_(static_cast<std::size_t>(2 * ranks * ranks)) {
    std::vector<std::int64_t> mine = blocks.inputs.counts;
    mine.insert(mine.end(), blocks.outputs.counts.begin(), blocks.outputs.counts.end());
    const Operation operation{
        Collective::all_gather, Algorithm::two_shot, DType::i64, ReduceOp::sum, 0, 2 * ranks};
    all_gather(operation, Call{operation, mine.data(), all_.data()});
  }

  std::int64_t largest() const;
  // The mismatch, the same for all ranks, if a rank expects another number of elements than is sent
  // to it.
  std::optional<CollectiveError> disagreement(const Comm& comm, const Operation& operation) const;

 private:
  // A row per rank: what it sends to each rank, then what it expects from each.
  std::int64_t at(int row, int column) const {
    return all_[static_cast<std::size_t>(row * 2 * ranks_ + column)];
  }

  const int ranks_;
  std::vector<std::int64_t> all_;
};

// Throws an error that all ranks find, after all have found it. Otherwise a rank that still waits
// for counts would only learn that the group has been aborted.
[[noreturn]] void fail_together(Comm& comm, const Operation& operation,
                                const CollectiveError& error);

// If blocks differ in size, sets the operation's count to the largest size, or to 0 if ranks do not
// know all sizes.
void set_count(Operation& operation, const Call& call, int ranks);

// Why a call's blocks cannot be used; empty if they can, or if there are none.
std::string refusal_of_blocks(const Call& call, int ranks);

// Runs an operation whose tensors are given as blocks.
//
// For all-gather and reduce-scatter, every rank knows the size of every block. For all-to-all, a rank
// knows only what it sends and receives; the ranks first exchange these counts and compare them. If a
// rank expects another number of elements than is sent to it, all ranks throw the same mismatch.
void run_in_blocks(Comm& comm, Operation operation, const Call& call, void (*interrupt)());

}  // namespace pycomm::cpu

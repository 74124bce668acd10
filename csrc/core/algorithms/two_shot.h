// Two-shot all-reduce, and its halves reduce-scatter and all-gather. Each chunk of a tile has one
// owner, which reduces it for all ranks.
//
//   1. Stage: each rank copies the chunks that other ranks own into its staging slot.
//   2. Reduce: the owner of a chunk adds the n contributions in rank order and writes the result to
//      its output and to its own slot.
//   3. Gather: each rank copies the other owners' results to its output, one tile behind, so that
//      it rarely waits for them.
//
// Zero copy: if all tensors lie in windows, there is one tile and no staging. The owner reads every
// rank's tensor and writes the result into every rank's tensor. The announcement replaces phase 1,
// and one last wait replaces phase 3.
//
// Per rank, for S bytes of result: (n-1)/n S read from peers in phase 2 and again in phase 3 (zero
// copy: written to peers instead); 2 signals per tile (zero copy: 1). Reduce-scatter is phases 1
// and 2, all-gather is phases 1 and 3. Rounds once. References: Rabenseifner 2004 for the halves;
// QuickReduce and vLLM for the combination.
//
// With a codec (core/codecs/codec.h), slots hold encoded elements. Phase 1 encodes every
// contribution, including the owner's. In phase 2 the owner decodes, adds and encodes the result,
// and decodes what it has encoded. Phase 3 decodes. The codec thus rounds a mean twice: each
// contribution, and the mean of them. Reduce-scatter has no phase 3, so it does not encode the
// result: it rounds each contribution once.
//
// Slots: a rank stages tile t only after every peer has staged t-1, hence has gathered t-3 (for
// all-gather, t-4). So with kStagingSlots = 4 the slot of t-4 is free.
#pragma once

#include "core/algorithms/blocks.h"

namespace pycomm {

// One owner's chunk of a tile: its first element in the input, the output and the slot, and its
// element count.
struct Chunk {
  std::int64_t input;
  std::int64_t output;
  std::int64_t slot;
  std::int64_t count;

  // True if the other one begins where this one ends.
  PYCOMM_HD constexpr bool is_before(const Chunk& other) const {
    return other.input - input == count && other.slot - slot == count;
  }
};

// All-reduce: a tile is a range of the tensor, divided evenly among the ranks.
template <class Comm>
struct EvenChunks {
  Comm& comm;

  PYCOMM_HD Tiles tiles() const {
    return {comm.count(), comm.zero_copy() ? comm.count() : comm.slot_count()};
  }
  PYCOMM_HD Chunk operator()(std::int64_t t, int owner) const {
    const Range tile = tiles()[t];
    const Range part = part_of(tile.count, comm.size(), owner, comm.line());
    return {tile.begin + part.begin, tile.begin + part.begin, part.begin, part.count};
  }
};

// Compressed all-reduce: an element's owner depends only on its index in the whole tensor. So the
// bits do not depend on how the whole is cut into tensors, or these into tiles. The owner changes
// every kOwnedElements elements, cyclically; a tile holds one piece of each owner's elements.
inline constexpr std::int64_t kOwnedElements = 16384;

template <class Comm>
class CyclicChunks {
 public:
  // `offset`: the first element in the whole tensor, a multiple of the codec's block. `piece` divides
  // kOwnedElements; a slot holds one piece per owner.
  PYCOMM_HD CyclicChunks(Comm& comm, std::int64_t offset, std::int64_t piece)
      : comm_(comm),
        piece_(static_cast<std::int32_t>(piece)),
        begin_(static_cast<std::int32_t>(-(offset % period()))) {}

  PYCOMM_HD Tiles tiles() const {
    const std::int64_t periods = ceil_div(comm_.count() - begin_, period());
    return {comm_.count() == 0 ? 0 : periods * (kOwnedElements / piece_), 1};
  }
  PYCOMM_HD Chunk operator()(std::int64_t t, int owner) const {
    const std::int64_t at = t * piece_;  // in an owner's elements; only constants divide it
    const std::int64_t start =
        begin_ + at / kOwnedElements * period() + owner * kOwnedElements + at % kOwnedElements;
    const std::int64_t begin = start < 0 ? 0 : start;
    const std::int64_t end = start + piece_ < comm_.count() ? start + piece_ : comm_.count();
    return {begin, begin, std::int64_t{owner} * piece_, end > begin ? end - begin : 0};
  }

 private:
  PYCOMM_HD std::int64_t period() const { return comm_.size() * kOwnedElements; }

  Comm& comm_;
  // In few registers.
  const std::int32_t piece_;
  const std::int32_t begin_;  // of the first period, not after the tensor's first element
};

// Reduce-scatter: the input holds a block per rank; a tile is the same range of every block.
template <class Comm>
struct InputBlocks {
  Comm& comm;

  PYCOMM_HD std::int64_t stride() const {
    return part_of(comm.slot_count(), comm.size(), comm.size() - 1, comm.line()).count;
  }
  PYCOMM_HD Tiles tiles() const {
    return {comm.count(), comm.zero_copy() ? comm.count() : stride()};
  }
  PYCOMM_HD Chunk operator()(std::int64_t t, int owner) const {
    const Range tile = tiles()[t];
    return {owner * comm.block() + tile.begin, tile.begin, owner * stride(),
            input_count(comm, owner, tile)};
  }
};

// All-gather: the output holds a block per rank. A rank stages only its own block.
template <class Comm>
struct OutputBlocks {
  Comm& comm;

  PYCOMM_HD Tiles tiles() const {
    return {comm.count(), comm.zero_copy() ? comm.count() : comm.slot_count()};
  }
  PYCOMM_HD Chunk operator()(std::int64_t t, int owner) const {
    const Range tile = tiles()[t];
    return {tile.begin, owner * comm.block() + tile.begin, 0, output_count(comm, owner, tile)};
  }
};

namespace detail {

template <Executor Comm>
PYCOMM_HD Location slot_of(Comm& comm, int r, std::int64_t t, const Chunk& chunk) {
  return comm.at(comm.slot(r, t % kStagingSlots), chunk.slot);
}

// Phase 1: stages the chunks that other ranks own, then waits until the others have staged this
// rank's chunk.
template <Executor Comm, class Chunks>
PYCOMM_HD void stage_for_owners(Comm& comm, const Chunks& chunks, std::int64_t t) {
  for (int owner = 0; owner < comm.size(); ++owner) {
    if (owner == comm.rank() && !Comm::kCoded) continue;
    Chunk chunk = chunks(t, owner);
    if constexpr (Comm::kCoded) {  // one pass takes all chunks that follow one another
      for (int next = owner + 1; next < comm.size(); ++next) {
        const Chunk other = chunks(t, next);
        if (!chunk.is_before(other)) break;
        chunk.count += other.count;
        owner = next;
      }
    }
    comm.copy(slot_of(comm, comm.rank(), t, chunk), input_at(comm, chunk.input), chunk.count);
  }
  comm.signal(kStaged);
  comm.wait_all(kStaged, t + 1);
}

// Phase 2. The result goes to the locations to(0), ..., to(n_to - 1). `last`: nothing will be added
// to it.
template <Executor Comm, class Chunks, class To>
PYCOMM_HD void reduce_owned(Comm& comm, const Chunks& chunks, std::int64_t t, int n_to, To to,
                            bool last) {
  const int me = comm.rank();
  const Chunk mine = chunks(t, me);
  const auto from = [&](int r) {
    if (comm.zero_copy()) return comm.at(comm.input(r), mine.input);
    return r == me && !Comm::kCoded ? input_at(comm, mine.input) : slot_of(comm, r, t, mine);
  };
  comm.reduce(n_to, to, comm.size(), from, mine.count, last);
}

// `everywhere`: the result goes to all ranks, not only to this rank's output.
template <Executor Comm, class Chunks>
PYCOMM_HD void reduce_owned(Comm& comm, const Chunks& chunks, std::int64_t t, bool everywhere,
                            bool last = true) {
  const int n = comm.size(), me = comm.rank();
  const Chunk mine = chunks(t, me);
  const auto to = [&](int i) {
    if (!everywhere) return output_at(comm, mine.output);
    if (comm.zero_copy()) return comm.at(comm.output(i), mine.output);
    return i == 0 ? output_at(comm, mine.output) : slot_of(comm, me, t, mine);
  };
  reduce_owned(comm, chunks, t, !everywhere ? 1 : comm.zero_copy() ? n : 2, to, last);
}

// Phase 3, with staging. Each rank starts with the next rank, so that they do not all read from one
// owner at the same time.
template <Executor Comm, class Chunks>
PYCOMM_HD void gather_from_owners(Comm& comm, const Chunks& chunks, std::int64_t t) {
  for (int i = 1; i < comm.size(); ++i) {
    const int owner = (comm.rank() + i) % comm.size();
    const Chunk chunk = chunks(t, owner);
    comm.copy(output_at(comm, chunk.output), slot_of(comm, owner, t, chunk), chunk.count);
  }
}

}  // namespace detail

template <Executor Comm, class Chunks>
PYCOMM_HD void two_shot(Comm& comm, const Chunks& chunks) {
  comm.announce();
  const std::int64_t tiles = chunks.tiles().count();
  for (std::int64_t t = 0; t <= tiles; ++t) {
    if (t < tiles) {
      if (!comm.zero_copy()) detail::stage_for_owners(comm, chunks, t);
      detail::reduce_owned(comm, chunks, t, true);
      comm.signal(kReduced);
    }
    if (t > 0) {
      comm.wait_all(kReduced, t);
      if (!comm.zero_copy()) detail::gather_from_owners(comm, chunks, t - 1);
    }
  }
}

template <Executor Comm>
PYCOMM_HD void two_shot(Comm& comm) {
  two_shot(comm, EvenChunks<Comm>{comm});
}

template <Executor Comm, class Chunks>
PYCOMM_HD void reduce_scatter(Comm& comm, const Chunks& chunks, bool last = true) {
  comm.announce();
  const std::int64_t tiles = chunks.tiles().count();
  for (std::int64_t t = 0; t < tiles; ++t) {
    if (!comm.zero_copy()) detail::stage_for_owners(comm, chunks, t);
    detail::reduce_owned(comm, chunks, t, false, last);
  }
  // Peers may still be reading this rank's tensor.
  if (comm.zero_copy()) {
    comm.signal(kReduced);
    comm.wait_all(kReduced, 1);
  }
}

template <PlainExecutor Comm>
PYCOMM_HD void reduce_scatter(Comm& comm) {
  reduce_scatter(comm, InputBlocks<Comm>{comm});
}

template <Executor Comm, class Chunks>
PYCOMM_HD void all_gather(Comm& comm, const Chunks& chunks) {
  comm.announce();
  const std::int64_t tiles = chunks.tiles().count();
  const int me = comm.rank();
  for (std::int64_t t = 0; t <= tiles; ++t) {
    if (t < tiles) {
      const Chunk mine = chunks(t, me);
      const Location from = input_at(comm, mine.input);
      if (comm.zero_copy()) {
        for (int i = 1; i <= comm.size(); ++i) {
          comm.copy(comm.at(comm.output((me + i) % comm.size()), mine.output), from, mine.count);
        }
      } else {
        comm.copy(detail::slot_of(comm, me, t, mine), from, mine.count);
        comm.copy(output_at(comm, mine.output), from, mine.count);
      }
      comm.signal(kStaged);
    }
    if (t > 0) {
      comm.wait_all(kStaged, t);
      if (!comm.zero_copy()) detail::gather_from_owners(comm, chunks, t - 1);
    }
  }
}

template <PlainExecutor Comm>
PYCOMM_HD void all_gather(Comm& comm) {
  all_gather(comm, OutputBlocks<Comm>{comm});
}

}  // namespace pycomm

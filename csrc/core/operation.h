// The description of an operation. Every rank announces it to every other rank, before any rank
// relies on the others' data.
#pragma once

#include "core/codecs/codec.h"
#include "core/elements.h"
#include "core/types.h"

namespace pycomm {

enum class Collective : std::uint8_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  barrier,
  reduce,
  gather,
  scatter,
  all_to_all,
  sharded_step  // of an optimizer: core/algorithms/sharded_step.h
};
template <>
struct Names<Collective> {
  static constexpr const char* all[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "barrier",    "reduce",         "gather",     "scatter",
                                        "all_to_all", "sharded_step"};
};

enum class Device : std::uint8_t { cpu, cuda };
template <>
struct Names<Device> {
  static constexpr const char* all[] = {"cpu", "cuda"};
};

// core/algorithms/table.h defines them.
enum class Algorithm : std::uint8_t { automatic, one_shot, two_shot, ring, tree, multicast };
template <>
struct Names<Algorithm> {
  static constexpr const char* all[] = {"auto", "one_shot", "two_shot",
                                        "ring", "tree",     "multicast"};
};

// The part of an announcement on which all ranks must agree.
struct Operation {
  Collective collective = Collective::barrier;
  Algorithm algorithm = Algorithm::one_shot;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  std::int32_t root = 0;
  std::int64_t count = 0;  // elements of the tensor, or of one rank's block
  Device device = Device::cpu;
  Element element = Element::same;  // the caller's; carried() sets it, together with `dtype`
  std::uint16_t tag = 0;            // set by the caller, to tell its operations from others
  std::uint32_t offset = 0;  // place in the whole tensor, in units of kSmallestBlock elements
  Codec codec = {};
  std::uint32_t details = 0;  // a hash of everything else that must agree (core/details.h)
};
static_assert(sizeof(Operation) == 40);

// True if the collective computes with elements, instead of only moving them.
PYCOMM_HD constexpr bool reduces(Collective collective) {
  return collective == Collective::all_reduce || collective == Collective::reduce_scatter ||
         collective == Collective::reduce;
}

// True if switches add such elements (core/algorithms/multicast.h).
PYCOMM_HD constexpr bool adds_in_switch(const Operation& operation) {
  const bool adds = operation.op == ReduceOp::sum || operation.op == ReduceOp::avg;
  return adds && (operation.dtype == DType::f32 || operation.dtype == DType::f16 ||
                  operation.dtype == DType::bf16);
}

// How many elements of `dtype` carry one of the caller's.
constexpr std::int64_t units_of(const Operation& operation) {
  if (operation.element == Element::same || !can_carry(operation.dtype, operation.element)) {
    return 1;
  }
  const ElementRow& row = row_of(operation.element);
  return row.units * size_of(row.dtype) / size_of(operation.dtype);
}

// Makes of the caller's operation, on `operation.count` elements of its type, the one that executors
// carry. Throws std::invalid_argument if the element type has no such reduction.
inline void carry(Operation& operation, Element element) {
  if (element == Element::same) return;
  const ElementRow& row = row_of(element);
  const bool own = row.arithmetic <= Arithmetic::integer;
  if (own && !is_bitwise(operation.op)) {  // nearly all calls
    operation.dtype = row.dtype;
    return;
  }
  const Representation representation =
      reduces(operation.collective) ? check_reduced_as(element, operation.op) : moved_as(element);
  operation.dtype = representation.dtype;
  operation.op = representation.op;
  operation.count *= representation.units;
  operation.element = own && representation.dtype == row.dtype ? Element::same : element;
}

inline Operation carried(Operation operation, Element element) {
  carry(operation, element);
  return operation;
}

// The index of the tensor's first element in the whole tensor. A caller may pass a large tensor in
// several operations; the "whole" is the large one, and each operation says where its tensor lies
// in it.
PYCOMM_HD constexpr std::int64_t first_element(const Operation& operation) {
  return operation.offset * kSmallestBlock;
}

PYCOMM_HD bool operator==(const Operation& a, const Operation& b) {
  return a.collective == b.collective && a.algorithm == b.algorithm && a.dtype == b.dtype &&
         a.op == b.op && a.root == b.root && a.device == b.device && a.element == b.element &&
         a.count == b.count && a.tag == b.tag && a.offset == b.offset && a.codec == b.codec &&
         a.details == b.details;
}

// More elements than any memory holds. With this limit, the bytes of all ranks' tensors stay below
// 2^63.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 44;

// True if an operation that another process announces is one that can exist.
constexpr bool is_valid(const Operation& operation) {
  const Codec& codec = operation.codec;
  return is_known(operation.collective) && is_known(operation.algorithm) &&
         is_known(operation.dtype) && is_known(operation.op) && is_known(operation.device) &&
         can_carry(operation.dtype, operation.element) && operation.root >= 0 &&
         operation.count >= 0 && operation.count <= kMostElements && is_known(codec.kind) &&
         is_known(codec.values);
}

// The elements of a rank's input in a collective that reduces.
PYCOMM_HD constexpr std::int64_t reduced_elements(const Operation& operation, int ranks) {
  return operation.collective == Collective::reduce_scatter ? operation.count * ranks
                                                            : operation.count;
}

// The bytes of a rank's tensors in a group of `ranks`. Top-k instead announces an area for its lists,
// whose size the executor determines.
PYCOMM_HD constexpr std::int64_t input_bytes(const Operation& operation, int ranks, int rank) {
  const std::int64_t block = operation.count * size_of(operation.dtype);
  switch (operation.collective) {
    case Collective::reduce_scatter:
    case Collective::all_to_all:
      return block * ranks;
    case Collective::scatter:
      return rank == operation.root ? block * ranks : 0;
    default:
      return block;
  }
}
PYCOMM_HD constexpr std::int64_t output_bytes(const Operation& operation, int ranks, int rank) {
  const std::int64_t block = operation.count * size_of(operation.dtype);
  switch (operation.collective) {
    case Collective::all_gather:
    case Collective::all_to_all:
      return block * ranks;
    case Collective::gather:
      return rank == operation.root ? block * ranks : 0;
    case Collective::reduce:
      return rank == operation.root ? block : 0;
    default:
      return block;
  }
}

// True if other ranks use this rank's input, or output, in place when there is zero copy. Zero copy
// requires that these tensors, of all ranks, lie in windows.
PYCOMM_HD constexpr bool shares_input(const Operation& operation, int rank) {
  switch (operation.collective) {
    case Collective::all_gather:
    case Collective::gather:
      return false;
    case Collective::scatter:
      return rank == operation.root;
    default:
      return true;
  }
}
PYCOMM_HD constexpr bool shares_output(const Operation& operation, int rank) {
  switch (operation.collective) {
    case Collective::reduce_scatter:
    case Collective::scatter:
    case Collective::all_to_all:
      return false;
    case Collective::gather:
    case Collective::reduce:
      return rank == operation.root;
    default:
      return true;
  }
}

// True if only the ranks of a node take part, each node for itself. Tensors must then lie in windows.
PYCOMM_HD constexpr bool stays_in_node(Collective collective) {
  return collective == Collective::sharded_step;
}

// True if a rank's blocks go to or come from other ranks one by one.
PYCOMM_HD constexpr bool moves_blocks(Collective collective) {
  return collective == Collective::gather || collective == Collective::scatter ||
         collective == Collective::all_to_all;
}

inline constexpr std::int64_t kNotInWindow = -1;

// For compressed operations with feedback: what a rank has found out about its tensor before it
// sends anything.
struct Preflight {
  std::uint8_t overflow = 0;   // the tensor is too large to be summed safely
  std::uint8_t nonfinite = 0;  // between nodes, after the sum: it has an infinity or a NaN
  std::uint16_t unused = 0;    // the tensor is all zeros, and Feedback::hold_unused is set
};

PYCOMM_HD constexpr Preflight make_preflight(bool overflow, bool unused) {
  return {static_cast<std::uint8_t>(overflow), 0, static_cast<std::uint16_t>(unused)};
}

// The combination of all ranks' findings: an overflow or a NaN on one rank suffices; a tensor is
// unused only if all ranks say so.
PYCOMM_HD constexpr Preflight operator|(Preflight a, Preflight b) {
  return {static_cast<std::uint8_t>(a.overflow | b.overflow),
          static_cast<std::uint8_t>(a.nonfinite | b.nonfinite),
          static_cast<std::uint16_t>(a.unused & b.unused)};
}

// Changes nothing in a combination: for ranks that have nothing to report.
inline constexpr Preflight kNeutralPreflight = make_preflight(false, true);

// One cache line in a rank's window. `epoch` is stored last (release) and read first (acquire).
// Operations alternate between two of these lines. This is safe: a rank that announces k + 2 has
// completed k + 1, so it has read every announcement of k + 1 (on CUDA, or a packet of every rank), so
// it knows that every rank has completed k and no longer reads the line of k.
struct alignas(64) Announcement {
  Operation operation;
  std::int64_t input = kNotInWindow;   // offsets of the tensors in this rank's window; on CUDA,
  std::int64_t output = kNotInWindow;  // addresses at which the reader sees them
  Preflight preflight;
  std::uint32_t epoch = 0;
};
static_assert(sizeof(Announcement) == 64);

// The number of the next operation. Operations are numbered 1, 2, 3, ...; after 2^32 - 1 comes 2.
// No operation has the number 0, which is what fresh memory holds, and odd and even numbers always
// alternate.
PYCOMM_HD constexpr std::uint32_t next_sequence(std::uint32_t sequence) {
  return sequence + 1 == 0 ? 2 : sequence + 1;
}

}  // namespace pycomm

// What an operation is, as every rank announces it to every other before any data is trusted.
#pragma once

#include "core/codecs/codec.h"
#include "core/types.h"

namespace pycomm {

enum class Collective : std::uint8_t { all_reduce, reduce_scatter, all_gather, broadcast, barrier };
template <>
struct Names<Collective> {
  static constexpr const char* all[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "barrier"};
};

enum class Device : std::uint8_t { cpu, cuda };
template <>
struct Names<Device> {
  static constexpr const char* all[] = {"cpu", "cuda"};
};

// What each is: core/algorithms/table.h.
enum class Algorithm : std::uint8_t { automatic, one_shot, two_shot, ring, tree };
template <>
struct Names<Algorithm> {
  static constexpr const char* all[] = {"auto", "one_shot", "two_shot", "ring", "tree"};
};

// The part on which all ranks must agree.
struct Operation {
  Collective collective = Collective::barrier;
  Algorithm algorithm = Algorithm::one_shot;
  DType dtype = DType::u8;
  ReduceOp op = ReduceOp::sum;
  std::int32_t root = 0;
  std::int64_t count = 0;  // elements: of the tensor, or of one rank's share where shares differ
  Device device = Device::cpu;
  std::uint16_t tag = 0;     // of the caller's, to tell its operations from others'
  std::uint32_t offset = 0;  // of the tensor in the whole, in kSmallestBlock elements
  Codec codec = {};
  std::uint32_t details = 0;  // a hash of everything else that must agree (core/details.h)
};
static_assert(sizeof(Operation) == 40);

// Index of the tensor's first element in the whole.
PYCOMM_HD constexpr std::int64_t first_element(const Operation& operation) {
  return operation.offset * kSmallestBlock;
}

PYCOMM_HD bool operator==(const Operation& a, const Operation& b) {
  return a.collective == b.collective && a.algorithm == b.algorithm && a.dtype == b.dtype &&
         a.op == b.op && a.root == b.root && a.device == b.device && a.count == b.count &&
         a.tag == b.tag && a.offset == b.offset && a.codec == b.codec && a.details == b.details;
}

// More than any memory holds; bytes of a world's tensors stay below 2^63.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 44;

// Whether an operation that another process announces can exist.
PYCOMM_HD constexpr bool is_valid(const Operation& operation) {
  const Codec& codec = operation.codec;
  return is_known(operation.collective) && is_known(operation.algorithm) &&
         is_known(operation.dtype) && is_known(operation.op) && is_known(operation.device) &&
         operation.root >= 0 && operation.count >= 0 && operation.count <= kMostElements &&
         is_known(codec.kind) && is_known(codec.values);
}

// Bytes of the tensors of one of `ranks` ranks. Top-k announces an area for lists instead, whose size
// is its executor's business.
PYCOMM_HD constexpr std::int64_t input_bytes(const Operation& operation, int ranks) {
  const bool blocks = operation.collective == Collective::reduce_scatter;
  return operation.count * size_of(operation.dtype) * (blocks ? ranks : 1);
}
PYCOMM_HD constexpr std::int64_t output_bytes(const Operation& operation, int ranks) {
  const bool blocks = operation.collective == Collective::all_gather;
  return operation.count * size_of(operation.dtype) * (blocks ? ranks : 1);
}

inline constexpr std::int64_t kNotInWindow = -1;

// Compressed, with feedback: what a rank knows of its tensor before anything is sent.
struct Preflight {
  std::uint16_t overflow = 0;  // it may not be summed
  std::uint16_t unused = 0;    // it is all zeros, and Feedback::hold_unused
};

PYCOMM_HD constexpr Preflight make_preflight(bool overflow, bool unused) {
  return {static_cast<std::uint16_t>(overflow), static_cast<std::uint16_t>(unused)};
}

// What ranks say together.
PYCOMM_HD constexpr Preflight operator|(Preflight a, Preflight b) {
  return {static_cast<std::uint16_t>(a.overflow | b.overflow),
          static_cast<std::uint16_t>(a.unused & b.unused)};
}

// One cache line in a rank's window. `epoch` is released last and acquired first. Operations use
// two of these lines in turn: a rank that announces k + 2 has completed k + 1, hence has read every
// announcement of k + 1, hence knows that everyone has completed k and reads its line no more.
struct alignas(64) Announcement {
  Operation operation;
  std::int64_t input = kNotInWindow;  // where the tensors lie in this rank's window
  std::int64_t output = kNotInWindow;
  Preflight preflight;
  std::uint32_t epoch = 0;
};
static_assert(sizeof(Announcement) == 64);

// Operations are numbered 1, 2, 3, ...; after 2^32 - 1 comes 2. None has the number 0, which is
// what fresh memory holds, and odd and even ones alternate for ever.
PYCOMM_HD constexpr std::uint32_t next_sequence(std::uint32_t sequence) {
  return sequence + 1 == 0 ? 2 : sequence + 1;
}

}  // namespace pycomm

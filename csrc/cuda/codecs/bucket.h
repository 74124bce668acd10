// The tensors of one compressed operation, and the table through which kernels see them. Host code.
#pragma once

#include <algorithm>
#include <vector>

#include "core/codecs/feedback.h"
#include "core/codecs/topk.h"
#include "core/hash.h"
#include "core/operation.h"

namespace pycomm::cuda {

// One tensor, with an operation of its own.
struct Part {
  Operation operation;
  const void* input = nullptr;
  void* output = nullptr;
  Feedback feedback = {};
};

// Tensors that are compressed each as if alone, but share launches. They have one codec (top-k: k may
// differ), one algorithm and one element type.
struct Bucket {
  std::vector<Part> parts;
  std::uint32_t* nonfinite = nullptr;  // device memory, set to 1 if a value is not finite; or null
  std::byte* workspace = nullptr;      // device memory, used until the operation is complete
};

// The bytes of a bucket's workspace in a group of `ranks`.
std::int64_t workspace_bytes(const std::vector<Part>& parts, int ranks);

// The bytes of a rank's staging that hold the most that a top-k tensor's lists can need.
inline std::int64_t most_list_bytes(const Operation& operation, int ranks) {
  if (operation.codec.kind != CodecKind::topk) return 0;
  const TopkArea area(operation, ranks);
  std::int64_t most = 0;
  for (int r = 0; r < ranks; ++r) most = std::max(most, area.bytes(r));
  return most;
}
// The ranks' preflights come before the lists.
constexpr std::int64_t preflight_bytes(std::size_t parts) {
  return round_up(static_cast<std::int64_t>(parts * sizeof(Preflight)), kLine);
}

// True if two tensors can be parts of one bucket.
inline bool share_launches(const Operation& a, const Operation& b) {
  Codec codec = b.codec;
  codec.k = a.codec.k;
  return a.algorithm == b.algorithm && a.dtype == b.dtype && a.op == b.op && a.codec == codec;
}

// What ranks announce for all parts together.
inline Operation whole_of(const std::vector<Part>& parts) {
  Operation whole = parts[0].operation;
  if (parts.size() == 1) return whole;
  std::uint64_t hash = kHashOfNothing;
  whole.count = 0;
  for (const Part& part : parts) {
    const Operation& one = part.operation;
    whole.count += one.count;
    for (const std::uint64_t word :
         {std::uint64_t{one.details} << 32 | one.offset, std::uint64_t{one.tag} << 32 | one.codec.k,
          static_cast<std::uint64_t>(one.count)}) {
      hash = add_to_hash(hash, word);
    }
  }
  whole.details = static_cast<std::uint32_t>(hash >> 32);
  return whole;
}

}  // namespace pycomm::cuda

// What executors with a codec of blocks share: what one pass over encoded elements is told, and
// where they lie in a staging area.
#pragma once

#include "core/algorithms/two_shot.h"
#include "core/codecs/codec.h"
#include "core/codecs/feedback.h"
#include "core/codecs/int8.h"
#include "core/rng.h"

namespace pycomm {

// Encoded elements from a block's beginning on. A cast has no scales.
struct Encoded {
  std::byte* payload;
  float* scales;
};

// What a pass adds up: encoded elements, or the caller's own contribution (payload is the tensor).
struct Source {
  Encoded encoded;
  bool own;
};

struct Pass {
  const Source* from = nullptr;
  int n_from = 0;
  Encoded to = {};
  void* output = nullptr;  // takes what was encoded, decoded; or null
  // With feedback (or null): added to the own contribution. What encoding loses, times `divisor`, is
  // then stored here, or added where the own contribution has been encoded before.
  float* residual = nullptr;
  Scaling scaling = {};
  // With an overflow the largest_safe(): the own contribution is limited to it, and the residual is
  // read but stays as it is.
  float limit = kInfinity;
  bool last = false;  // all contributions are in: `divisor` applies
  float divisor = 1;
  std::int64_t n = 0;
  Random random = {};
  std::int64_t first = 0;  // index of the first element in the whole, for random

  PYCOMM_HD bool stores_residual() const { return residual != nullptr && limit == kInfinity; }
};

PYCOMM_HD constexpr std::int64_t payload_size(const Codec& codec) {
  return is_scaled(codec) ? 1 : size_of(codec.values);
}

// What takes the place of a block where the codec has none.
PYCOMM_HD constexpr std::int64_t block_of(const Codec& codec) {
  return is_scaled(codec) ? codec.block : kSmallestBlock;
}

// A staging area as one encoded tile: the payload of all slots, then the scales of all slots.
struct CodedStaging {
  std::int64_t payload;  // bytes of an element
  std::int64_t block;
  std::int64_t slot;  // elements
  int shift;          // log2 of the block

  // In so many bytes.
  PYCOMM_HD static constexpr CodedStaging in(std::int64_t bytes, const Codec& codec) {
    const std::int64_t payload = payload_size(codec), block = block_of(codec);
    const std::int64_t blocks = bytes / (block * payload + 4);
    int shift = 0;
    while (std::int64_t{1} << shift < block) ++shift;
    return {payload, block, blocks / kStagingSlots * block, shift};
  }
  // The pieces of CyclicChunks, one of every rank to a slot; 0 where none fit.
  PYCOMM_HD constexpr std::int64_t piece(int ranks) const {
    std::int64_t piece = kOwnedElements;
    while (piece >= block && piece * ranks > slot) piece /= 2;
    return piece < block ? 0 : piece;
  }
  // Bytes that are enough for so many ranks.
  PYCOMM_HD constexpr std::int64_t enough(int ranks) const {
    return kStagingSlots * (ranks + 1) * block * (payload + 1);
  }
  PYCOMM_HD Encoded operator[](Location location) const {
    return {location.data + location.coded * payload,
            reinterpret_cast<float*>(location.data + kStagingSlots * slot * payload) +
                (location.coded >> shift)};
  }
};

}  // namespace pycomm

// What the CPU and CUDA executors of block codecs share: the arguments of one pass over encoded
// elements, and the layout of encoded elements in a staging area.
#pragma once

#include "core/algorithms/two_shot.h"
#include "core/codecs/codec.h"
#include "core/codecs/feedback.h"
#include "core/codecs/int8.h"
#include "core/rng.h"

namespace pycomm {

// Encoded elements, starting at a block boundary. Casts have no scales.
struct Encoded {
  std::byte* payload;
  float* scales;
};

// One input of a pass: encoded elements, or this rank's own contribution. For the latter, `payload`
// points to the caller's tensor.
struct Source {
  Encoded encoded;
  bool own;
};

struct Pass {
  const Source* from = nullptr;
  int n_from = 0;
  Encoded to = {};
  void* output = nullptr;  // receives the result, encoded and decoded again; or null
  // With feedback: the residual, which is added to the own contribution. The pass then stores the
  // encoding error times `divisor` here; if an earlier pass has encoded the own contribution, it
  // adds the error instead. Null without feedback.
  float* residual = nullptr;
  Scaling scaling = {};
  // After an overflow: largest_safe(), which limits the own contribution. The residual is then read
  // but not written.
  float limit = kInfinity;
  bool last = false;  // this pass adds the last contribution: divide by `divisor`
  float divisor = 1;
  std::int64_t n = 0;
  Random random = {};
  std::int64_t first = 0;  // index of the first element in the whole tensor, for `random`

  PYCOMM_HD bool stores_residual() const { return residual != nullptr && limit == kInfinity; }
};

PYCOMM_HD constexpr std::int64_t payload_size(const Codec& codec) {
  return is_scaled(codec) ? 1 : size_of(codec.values);
}

// The layout of a staging area that holds encoded elements: the payload of all slots, then the
// scales of all slots.
struct CodedStaging {
  std::int64_t payload;  // bytes per encoded element
  std::int64_t block;
  std::int64_t slot;  // elements per slot
  int shift;          // log2 of the block

  // The layout of a staging area of `bytes` bytes.
  PYCOMM_HD static constexpr CodedStaging in(std::int64_t bytes, const Codec& codec) {
    const std::int64_t payload = payload_size(codec), block = block_of(codec);
    const std::int64_t blocks = bytes / (block * payload + 4);
    return {payload, block, blocks / kStagingSlots * block, block_shift(codec)};
  }
  // The piece size for CyclicChunks, such that a slot holds one piece per rank; 0 if none fits.
  PYCOMM_HD constexpr std::int64_t piece(int ranks) const {
    std::int64_t piece = kOwnedElements;
    while (piece >= block && piece * ranks > slot) piece /= 2;
    return piece < block ? 0 : piece;
  }
  // A staging area of this many bytes is large enough for `ranks` ranks.
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

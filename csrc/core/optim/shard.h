// What sharded steps read, on CPU and CUDA alike: the parts of parameters and gradients that one rank
// owns.
#pragma once

#include "core/hash.h"
#include "core/optim/segment.h"

namespace pycomm {

// One parameter in a sharded step. Python fills it in as 64-bit words: pycomm/optim/_executors.py.
struct Shard {
  Segment part;              // this rank's elements; parameter and gradient lie in the arena
  std::int64_t whole;        // the number of elements of the parameter
  std::int64_t is_averaged;  // not 0: this rank's gradient is already the average
};
static_assert(sizeof(Shard) == 16 * 8);

// The sums that ranks exchange: of the squares of gradients, and for LAMB of weights and directions.
enum ShardSum : int { kGradients, kWeights, kDirections, kShardSums };

// Hashes of what changes the result and that ranks have alike.

inline std::uint64_t add_to_hash(std::uint64_t hash, const Settings& s) {
  const bool flags[] = {s.amsgrad, s.decoupled, s.nesterov, s.maximize, s.adapt, s.stochastic};
  for (const bool flag : flags) hash = add_to_hash(hash, flag ? 1 : 0);
  hash = add_to_hash(add_to_hash(hash, std::uint64_t(s.rule)), s.seed);
  for (const double value :
       {s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.momentum, s.dampening}) {
    hash = add_to_hash(hash, bit_cast<std::uint64_t>(value));
  }
  return hash;
}

inline std::uint64_t add_to_hash(std::uint64_t hash, const Shard& shard) {
  const auto& [part, whole, is_averaged] = shard;
  hash = add_to_hash(hash, part.stream);
  hash = add_to_hash(hash, static_cast<std::uint64_t>(whole) << 1 | (is_averaged != 0 ? 1 : 0));
  for (const Storage storage :
       {part.param_storage, part.grad_storage, part.master_storage, part.state_storage[0]}) {
    hash = add_to_hash(hash, static_cast<std::uint64_t>(storage));
  }
  return hash;
}

}  // namespace pycomm

// The algorithm that algorithm="auto" selects. It is a pure function of what all ranks know, so all
// ranks select the same one.
#pragma once

#include "core/operation.h"
#include "core/types.h"

namespace pycomm {

struct Choice {
  Device device;
  int max_ranks;           // the row applies to groups of up to this many ranks
  std::int64_t max_bytes;  // and to tensors of up to this size
  Algorithm algorithm;
};

inline constexpr std::int64_t kAnySize = INT64_MAX;
inline constexpr int kAnyRanks = INT32_MAX;

// Measured with `python -m pycomm.bench all_reduce -a all` (benchmarks/results/). The first
// matching row applies. `python -m pycomm.bench.gpu.sweep` writes the rows for CUDA.
inline constexpr Choice kChoices[] = {
    {Device::cpu, 2, 4 << 10, Algorithm::one_shot},
    {Device::cpu, 2, kAnySize, Algorithm::two_shot},
    {Device::cpu, 4, 32 << 10, Algorithm::one_shot},
    {Device::cpu, kAnyRanks, 16 << 10, Algorithm::one_shot},
    {Device::cpu, kAnyRanks, kAnySize, Algorithm::two_shot},
    // CUDA: not measured over links yet, the published crossover points of vLLM's kernels.
    {Device::cuda, 4, 512 << 10, Algorithm::one_shot},
    {Device::cuda, kAnyRanks, 256 << 10, Algorithm::one_shot},
    {Device::cuda, kAnyRanks, kAnySize, Algorithm::two_shot},
};

// Both candidates add in rank order and round once, so the choice does not affect the bits of the
// result.
constexpr Algorithm select_algorithm(std::int64_t bytes, int ranks, Device device) {
  for (const Choice& choice : kChoices) {
    if (choice.device == device && ranks <= choice.max_ranks && bytes <= choice.max_bytes) {
      return choice.algorithm;
    }
  }
  return Algorithm::two_shot;
}

// The algorithm that an operation runs. For "auto", compressed operations always use two-shot, so
// that the number of lossy roundings does not depend on the tensor's size. Operations that span
// nodes always use two-shot, too.
constexpr Algorithm resolve(const Operation& operation, int ranks, bool spans_nodes = false) {
  if (operation.algorithm != Algorithm::automatic) return operation.algorithm;
  if (operation.codec.kind != CodecKind::none || spans_nodes) return Algorithm::two_shot;
  return select_algorithm(operation.count * size_of(operation.dtype), ranks, operation.device);
}

}  // namespace pycomm

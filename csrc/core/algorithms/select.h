// The algorithm that algorithm="auto" selects. It is a pure function of what all ranks know, so all
// ranks select the same one.
#pragma once

#include <span>

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

// A row of the table that a group may have for all-reduces between nodes: the largest groups and
// tensors to which it applies. Its algorithm may add in another order than two-shot.
struct AlgorithmRow {
  int max_nodes = kAnyRanks;
  int max_ranks = kAnyRanks;
  std::int64_t max_bytes = kAnySize;
  Algorithm algorithm = Algorithm::two_shot;
};

// The index of the first row that applies; -1 if there is none.
constexpr int matching_row(std::span<const AlgorithmRow> table, int nodes, int ranks,
                           std::int64_t bytes) {
  int index = 0;
  for (const AlgorithmRow& row : table) {
    if (nodes <= row.max_nodes && ranks <= row.max_ranks && bytes <= row.max_bytes) return index;
    ++index;
  }
  return -1;
}

// The algorithm that an operation runs. For "auto", compressed operations always use two-shot, so
// that the number of lossy roundings does not depend on the tensor's size. Between nodes, other
// all-reduces ask the group's table, and all else uses two-shot.
constexpr Algorithm resolve(const Operation& operation, int ranks, int nodes = 1,
                            std::span<const AlgorithmRow> table = {}) {
  if (operation.algorithm != Algorithm::automatic) return operation.algorithm;
  if (operation.codec.kind != CodecKind::none) return Algorithm::two_shot;
  const std::int64_t bytes = operation.count * size_of(operation.dtype);
  if (nodes == 1) return select_algorithm(bytes, ranks, operation.device);
  if (operation.collective != Collective::all_reduce) return Algorithm::two_shot;
  const int row = matching_row(table, nodes, ranks, bytes);
  return row < 0 ? Algorithm::two_shot : table[static_cast<std::size_t>(row)].algorithm;
}

}  // namespace pycomm

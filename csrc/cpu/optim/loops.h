// The loops of optimizers over one chunk, which stays in the first-level cache: numbers from memory
// to fp32, the update over core/ arithmetic, and back. What is common in memory is used in place:
// fp32, bf16 with or without remainders. Everything else goes through buffers of fp32.
#pragma once

#include "core/optim/square_sum.h"
#include "core/optim/state8.h"
#include "core/optim/table.h"
#include "core/rng.h"

namespace pycomm::cpu {

inline constexpr std::int64_t kChunk = kSumBlock;
static_assert(kChunk % kStateBlock == 0 && kChunk == kMixedRun);

// A run of numbers in memory.
struct Numbers {
  Storage storage = Storage::none;
  bool squares = false;  // second moments: never below zero
  std::byte* data = nullptr;
  float* largest = nullptr;           // of code8, per block
  std::uint16_t* bfloat16 = nullptr;  // of remainder, the other half
};

// `n` of them from element `at`, as fp32: in `buffer`, or where they lie already.
float* load_chunk(const Numbers& numbers, std::int64_t at, std::int64_t n, float* buffer);

// Stores what load_chunk() returned. `random`: the chunk's bits, to round bf16 and second moments with;
// null rounds to nearest, which only conversions do to second moments.
void store_chunk(const Numbers& numbers, std::int64_t at, std::int64_t n, const float* values,
                 const MixedBits* random);

// Stores fp32 weights in the parameter that they stand beside. In bf16 with ties away from zero, as
// beside remainders: so a model trains to the same bits with either.
void store_beside(const Numbers& param, std::int64_t at, std::int64_t n, const float* weights);

// How weights and gradients of a chunk are stored: both as fp32, both as bf16, or both as bf16 with
// remainders of the weights.
enum class Weights : std::uint8_t { fp32, bf16, split };

// A chunk's numbers, wherever they lie. Gradients are multiplied by `scale` first.
struct ChunkView {
  std::int64_t n;
  float scale;
  Weights weights;
  bool bf16_states;  // otherwise fp32
  MixedBits random;
  const void* g;
  void* p;
  std::uint16_t* remainder;
  void* state[kMostStates];
};

template <class Element>
void update_chunk(const Element& element, const ChunkView& chunk);

struct LambSums {
  double weights;
  double directions;
};
// Of a chunk in fp32.
LambSums lamb_sums(const Lamb& lamb, const ChunkView& chunk);

// Of gradients: fp32, fp16 or bf16.
double square_sum(const Numbers& numbers, std::int64_t at, std::int64_t n);

}  // namespace pycomm::cpu

// The optimizers' loops over one chunk, which stays in the first-level cache: numbers are converted
// to fp32, updated by the arithmetic of core/, and converted back. Common formats are used in
// place: fp32, and bf16 with or without remainders. Other formats go through fp32 buffers.
#pragma once

#include "core/optim/square_sum.h"
#include "core/optim/state8.h"
#include "core/optim/table.h"
#include "core/rng.h"

namespace pycomm::cpu {

inline constexpr std::int64_t kChunk = kSumBlock;
static_assert(kChunk % kStateBlock == 0 && kChunk == kMixedRun);

// An array of numbers in memory.
struct Numbers {
  Storage storage = Storage::none;
  Role role = Role::weight;  // gradients: as weights
  std::byte* data = nullptr;
  float* largest = nullptr;           // code8: scales, one per block
  std::uint16_t* bfloat16 = nullptr;  // remainder: the bf16 halves
};

// Loads `n` numbers from element `at` on, as fp32. Returns `buffer`, or for fp32 a pointer to the
// numbers themselves.
float* load_chunk(const Numbers& numbers, std::int64_t at, std::int64_t n, float* buffer);

// The random bits of a chunk's elements.
void draw(const MixedBits& random, std::int64_t n, std::uint32_t* to);

// Stores values that load_chunk() returned. The random bits round bf16 weights and states. Null rounds
// to nearest, which only conversions use for states.
void store_chunk(const Numbers& numbers, std::int64_t at, std::int64_t n, const float* values,
                 const std::uint32_t* random);

// Copies fp32 weights to the parameter. Rounds to bf16 with ties away from zero, like split(), so
// that a model trains to the same bits with fp32 weights and with remainders.
void store_beside(const Numbers& param, std::int64_t at, std::int64_t n, const float* weights);

// How a chunk's weights and gradients are stored: both fp32, both bf16, or both bf16 with
// remainders of the weights.
enum class Weights : std::uint8_t { fp32, bf16, split };

// Pointers to a chunk's numbers. Gradients are first multiplied by `scale`.
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
// The sums of squares of a chunk's weights and directions, for a chunk in fp32.
LambSums lamb_sums(const Lamb& lamb, const ChunkView& chunk);

// The sum of squares of gradients in fp32, fp16 or bf16.
double square_sum(const Numbers& numbers, std::int64_t at, std::int64_t n);

}  // namespace pycomm::cpu

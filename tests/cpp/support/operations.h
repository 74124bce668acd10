// Operations of every kind.
#pragma once

#include <vector>

#include "core/algorithms/table.h"
#include "core/operation.h"

namespace pycomm::test {

// Every plain operation that is not sharded: all-reduce by every algorithm, then the others.
inline std::vector<Operation> plain_operations() {
  std::vector<Operation> made;
  for (int i = 0; i < kCountOf<Collective>; ++i) {
    const auto collective = static_cast<Collective>(i);
    if (stays_in_node(collective)) continue;
    for (int a = 1; a < kCountOf<Algorithm>; ++a) {
      if (a > 1 && collective != Collective::all_reduce) continue;
      made.push_back({collective, static_cast<Algorithm>(a), DType::f32, ReduceOp::sum, 0, 0});
    }
  }
  return made;
}

// An all-reduce of so many floats that travel in packets.
inline Operation packets(std::int64_t count) {
  return {Collective::all_reduce, Algorithm::one_shot, DType::f32, ReduceOp::sum, 0, count};
}

inline Codec int8(std::uint32_t block, bool feedback) {
  Codec codec;
  codec.kind = CodecKind::int8;
  codec.block = block;
  codec.stochastic = 1;
  codec.feedback = feedback ? 1 : 0;
  return codec;
}

inline Codec cast() {
  Codec codec;
  codec.kind = CodecKind::cast;
  codec.values = DType::bf16;
  codec.feedback = 1;
  return codec;
}

inline Codec top(std::int64_t k, DType values) {
  Codec codec;
  codec.kind = CodecKind::topk;
  codec.k = static_cast<std::uint32_t>(k);
  codec.values = values;
  codec.feedback = 1;
  return codec;
}

inline Operation compressed(Algorithm algorithm, DType dtype, const Codec& codec,
                            std::int64_t count) {
  Operation operation{Collective::all_reduce, algorithm, dtype, ReduceOp::avg, 0, count};
  operation.codec = codec;
  return operation;
}

// One of every kind, plain and compressed, of so many floats.
inline std::vector<Operation> all_operations(std::int64_t count) {
  std::vector<Operation> made = plain_operations();
  for (Operation& operation : made) {
    if (operation.collective != Collective::barrier) operation.count = count;
  }
  for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
    made.push_back(compressed(algorithm, DType::f32, int8(kLargestBlock, true), count));
  }
  made.push_back(compressed(Algorithm::two_shot, DType::f32, cast(), count));
  made.push_back(
      compressed(Algorithm::two_shot, DType::f32, top(count / 20 + 1, DType::f32), count));
  return made;
}

}  // namespace pycomm::test

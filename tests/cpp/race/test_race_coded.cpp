// Searches the kernels of compressed collectives for races, as test_race_plain.cpp does for the others.
#include "core/algorithms/two_shot.h"
#include "cuda/codecs/topk.cuh"
#include "race/world.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

struct Buffers {
  std::vector<float> input, output, residual, velocity;
  std::vector<std::byte> workspace;
  std::uint32_t nonfinite = 0;
};

std::int64_t workspace_bytes(const Operation& operation, int n) {
  return cuda::TopkScratch(nullptr, operation.count, operation.codec.k, n, true).bytes;
}

void run(int n, const std::vector<Operation>& operations) {
  RaceWorld world(n, 1, false);
  std::vector<Buffers> ranks(static_cast<std::size_t>(n));
  for (const Operation& operation : operations) {
    for (Buffers& of : ranks) {
      const auto size = static_cast<std::size_t>(operation.count);
      for (auto* const tensor : {&of.input, &of.output, &of.residual, &of.velocity}) {
        tensor->resize(std::max(tensor->size(), size));
      }
      of.workspace.resize(
          std::max(of.workspace.size(), static_cast<std::size_t>(workspace_bytes(operation, n))));
      for (std::size_t i = 0; i < size; ++i) of.input[i] = static_cast<float>(i * 7919 % 1009);
    }
  }
  world.run([&](int r) {
    Buffers& mine = ranks[static_cast<std::size_t>(r)];
    for (const Operation& operation : operations) {
      cuda::Compression compression{{}, &mine.nonfinite, mine.workspace.data()};
      compression.feedback.residual = mine.residual.data();
      if (operation.codec.kind == CodecKind::topk) {
        compression.feedback.velocity = mine.velocity.data();
      }
      world[r].check(operation, mine.input.data());
      world[r].launch(operation, mine.input.data(), mine.output.data(), 0, compression);
      world.write(mine.output);
    }
  });
}

Operation coded(Algorithm algorithm, std::int64_t count) {
  Operation operation{Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, count};
  operation.device = Device::cuda;
  operation.codec.feedback = 1;
  return operation;
}

Operation int8(Algorithm algorithm, std::int64_t count, std::uint32_t block, bool stochastic) {
  Operation operation = coded(algorithm, count);
  operation.codec.kind = CodecKind::int8;
  operation.codec.block = block;
  operation.codec.stochastic = stochastic ? 1 : 0;
  return operation;
}

Operation top(std::int64_t count, std::int64_t k, DType values) {
  Operation operation = coded(Algorithm::two_shot, count);
  operation.codec.kind = CodecKind::topk;
  operation.codec.k = k;
  operation.codec.values = values;
  return operation;
}

// The first tensor has more tiles than there are slots.
void two_shot(int n) {
  const std::int64_t tiles = (kStagingSlots + 1) * n * kOwnedElements;
  run(n, {int8(Algorithm::two_shot, tiles + 3, 256, true),
          int8(Algorithm::two_shot, 9001, 4096, false)});
}

void partial_sums(int n) {
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree}) {
    run(n, {int8(algorithm, 40'001, 256, false), int8(algorithm, 9001, 4096, true)});
  }
}

// The first tensor has more chunks than there are ranks.
void lists(int n) {
  run(n, {top(n * kTopkChunk + 9001, 900, DType::u8), top(9001, 2000, DType::f32)});
}

}  // namespace
}  // namespace pycomm::test

int main(int argc, char** argv) {
  using namespace pycomm::test;
  return run_all(
      {
          {"two-shot, 2 ranks", [] { two_shot(2); }},
          {"two-shot, 3 ranks", [] { two_shot(3); }},
          {"ring and tree, 2 ranks", [] { partial_sums(2); }},
          {"ring and tree, 3 ranks", [] { partial_sums(3); }},
          {"top-k, 2 ranks", [] { lists(2); }},
      },
      argc > 1 ? argv[1] : "");
}

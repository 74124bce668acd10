// Searches the kernels of compressed collectives for races, as test_race_plain.cpp does for the others.
#include "core/algorithms/two_shot.h"
#include "cuda/codecs/bucket.h"
#include "race/world.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

struct Buffers {
  explicit Buffers(std::size_t size) : input(size), output(size), residual(size), velocity(size) {
    for (std::size_t i = 0; i < size; ++i) input[i] = static_cast<float>(i * 7919 % 1009);
  }

  cuda::Part part(const Operation& operation) {
    cuda::Part made{operation, input.data(), output.data()};
    if (operation.codec.feedback != 0) made.feedback.residual = residual.data();
    if (operation.codec.kind == CodecKind::topk) made.feedback.velocity = velocity.data();
    return made;
  }

  std::vector<float> input, output, residual, velocity;
};

// Each bucket uses the tensors of the one before.
void run(int n, const std::vector<std::vector<Operation>>& buckets) {
  std::int64_t most = 0;
  for (const auto& bucket : buckets) {
    for (const Operation& operation : bucket) most = std::max(most, operation.count);
  }
  RaceWorld world(n, 1, false);
  world.run([&](int r) {
    std::vector<Buffers> tensors(2, Buffers(static_cast<std::size_t>(most)));
    std::vector<std::byte> workspace;
    std::uint32_t nonfinite = 0;
    for (const auto& operations : buckets) {
      cuda::Bucket bucket{{}, &nonfinite, nullptr};
      for (const Operation& operation : operations) {
        bucket.parts.push_back(tensors[bucket.parts.size()].part(operation));
      }
      world[r].synchronize();  // the workspace is used no more
      workspace.resize(static_cast<std::size_t>(cuda::workspace_bytes(bucket.parts, n)));
      bucket.workspace = workspace.data();
      const cuda::Part& first = bucket.parts[0];
      world[r].launch(cuda::whole_of(bucket.parts), first.input, first.output, 0, bucket);
      for (Buffers& mine : tensors) world.write(mine.output);
    }
    world[r].synchronize();
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

Operation without_residual(Operation operation) {
  operation.codec.feedback = 0;
  return operation;
}

Operation top(std::int64_t count, std::int64_t k, DType values) {
  Operation operation = coded(Algorithm::two_shot, count);
  operation.codec.kind = CodecKind::topk;
  operation.codec.k = k;
  operation.codec.values = values;
  return operation;
}

// The first tensor has more tiles than there are slots. The last one has whole runs and a rest.
void two_shot(int n) {
  const std::int64_t tiles = (kStagingSlots + 1) * n * kOwnedElements;
  run(n, {{int8(Algorithm::two_shot, tiles + 3, 256, true),
           int8(Algorithm::two_shot, 4097, 256, true)},
          {int8(Algorithm::two_shot, 9001, 4096, false)},
          {without_residual(int8(Algorithm::two_shot, tiles / 2 + 900, 256, false))}});
}

void partial_sums(int n) {
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree}) {
    run(n, {{int8(algorithm, 40'001, 256, false)},
            {int8(algorithm, 9001, 4096, true), int8(algorithm, 300, 4096, true)}});
  }
}

// The first tensor has more chunks than there are ranks.
void lists(int n) {
  run(n, {{top(n * kTopkChunk + 9001, 900, DType::u8), top(300, 20, DType::u8)},
          {top(9001, 2000, DType::f32)}});
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

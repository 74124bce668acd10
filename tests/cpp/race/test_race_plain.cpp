// Searches the kernels of uncompressed collectives for races: runs them under ThreadSanitizer
// (device/order.h), which reports them. That results are right is for other tests.
#include "core/operation.h"
#include "race/world.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

struct Buffers {
  std::vector<float> input, output;
};

// Ranks run operations one after the other. Whatever an operation has used belongs to its rank again
// afterwards, which writes it.
void run(int n, bool stage_always, const std::vector<Operation>& operations) {
  RaceWorld world(n, 1, stage_always);
  std::vector<Buffers> ranks(static_cast<std::size_t>(n));
  for (const Operation& operation : operations) {
    const auto size = static_cast<std::size_t>(operation.count * n);
    for (Buffers& of : ranks) {
      of.input.resize(std::max(of.input.size(), size));
      of.output.resize(of.input.size());
    }
  }
  world.run([&](int r) {
    Buffers& mine = ranks[static_cast<std::size_t>(r)];
    for (const Operation& operation : operations) {
      world[r].launch(operation, mine.input.data(), mine.output.data(), 0, {});
      world.write(mine.input);
      world.write(mine.output);
    }
  });
}

Operation plain(Collective collective, Algorithm algorithm, std::int64_t count, int root = 0) {
  Operation operation{collective, algorithm, DType::f32, ReduceOp::sum, root, count};
  operation.device = Device::cuda;
  return operation;
}

// Elements of less than a tile, and of as many packets as the few threads can take.
constexpr std::int64_t kSmall = 3'000, kPackets = 54;

// More tiles than there are slots, in a staging area of two halves.
std::int64_t large(int n) {
  const std::int64_t slot = cuda::least_staging_bytes(n, 1) / 2 / kStagingSlots;
  return (kStagingSlots + 1) * slot / static_cast<std::int64_t>(sizeof(float)) + 1;
}

void all_reduces(int n) {
  for (const bool staged : {false, true}) {
    std::vector<Operation> operations;
    for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree,
                                      Algorithm::one_shot, Algorithm::multicast}) {
      for (const std::int64_t count : {large(n), kSmall, kSmall}) {
        operations.push_back(plain(Collective::all_reduce, algorithm, count));
      }
    }
    run(n, staged, operations);
  }
}

// Each operation uses again what was used two operations before: also slots, if one in packets is between.
void packets(int n) {
  std::vector<Operation> operations;
  for (int i = 0; i < 25; ++i) {
    const bool staged = i % 5 == 0 || i % 5 == 2;
    operations.push_back(
        plain(Collective::all_reduce, Algorithm::one_shot, staged ? kSmall : kPackets));
  }
  run(n, false, operations);
}

void collectives(int n) {
  for (const bool staged : {false, true}) {
    std::vector<Operation> operations;
    for (const Collective collective :
         {Collective::reduce_scatter, Collective::all_gather, Collective::broadcast,
          Collective::reduce, Collective::gather, Collective::scatter, Collective::all_to_all}) {
      for (const std::int64_t count : {large(n), kSmall, kSmall}) {
        operations.push_back(plain(collective, Algorithm::two_shot, count, n - 1));
      }
    }
    operations.push_back(plain(Collective::barrier, Algorithm::two_shot, 0));
    run(n, staged, operations);
  }
}

}  // namespace
}  // namespace pycomm::test

int main(int argc, char** argv) {
  using namespace pycomm::test;
  return run_all(
      {
          {"all-reduce, 2 ranks", [] { all_reduces(2); }},
          {"all-reduce, 3 ranks", [] { all_reduces(3); }},
          {"packets, 2 ranks", [] { packets(2); }},
          {"packets, 3 ranks", [] { packets(3); }},
          {"collectives, 2 ranks", [] { collectives(2); }},
          {"collectives, 3 ranks", [] { collectives(3); }},
      },
      argc > 1 ? argv[1] : "");
}

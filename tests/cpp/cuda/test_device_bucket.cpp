// Compressed operations of several tensors, run on the CPU (device/cuda_runtime.h): every tensor must get
// the bits that it gets alone on the CPU.
#include <memory>
#include <string>
#include <vector>

#include "cuda/group.h"
#include "support/device_world.h"
#include "support/operations.h"
#include "support/rank_tensors.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kReferenceStaging = 1 << 20;

using Operations = std::vector<Operation>;

// Ranks with a group on the device. `together`: they share kernel launches.
struct Ranks {
  Ranks(int n, bool together, std::int64_t staging) : hosts(n), device(n, 60, false, staging) {
    for (int r = 0; r < n; ++r) {
      // The world owns the groups.
      const std::shared_ptr<cpu::Group> host(std::shared_ptr<void>(), &hosts[r]);
      groups.push_back(std::make_unique<cuda::Group>(host, device.endpoints[r],
                                                     together ? device.shared : nullptr));
    }
  }
  int size() const { return hosts.size(); }

  World hosts;
  DeviceWorld device;
  std::vector<std::unique_ptr<cuda::Group>> groups;
};

// A bucket's tensors on all ranks.
struct Contents {
  Contents(const Operations& of, int n) : operations(of) {
    for (const Operation& operation : of) {
      tensors.emplace_back(operation, n, static_cast<unsigned>(tensors.size()));
      tensors.back().hold_unused = true;
    }
  }

  void set(std::size_t part, int r, float value) {
    visit_dtype(operations[part].dtype, [&](auto type) {
      using T = decltype(type);
      if constexpr (std::is_same_v<accumulator_t<T>, float>) {
        auto* const x = reinterpret_cast<T*>(tensors[part].x[r].data());
        std::fill_n(x, operations[part].count, store<T>(value));
      }
    });
  }

  std::vector<Call> calls(int r) {
    std::vector<Call> made;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      made.push_back({operations[i], tensors[i].x[r].data(), tensors[i].y[r].data(),
                      tensors[i].feedback(operations[i], r)});
    }
    return made;
  }

  Operations operations;
  std::vector<Tensors> tensors;
};

Bytes workspace_of(const std::vector<Call>& calls, int n) {
  std::vector<cuda::Part> parts;
  for (const Call& call : calls) parts.push_back({call.operation});
  return Bytes(static_cast<std::size_t>(cuda::workspace_bytes(parts, n)), std::byte{0xcd});
}

// Runs the bucket, twice, because residuals of the first time count in the second.
void compare(Ranks& ranks, World& reference, Contents want, bool nonfinite = false) {
  const int n = ranks.size();
  Contents got = want;
  std::vector<std::uint32_t> flags(static_cast<std::size_t>(n));
  for (int turn = 0; turn < 2; ++turn) {
    for (std::size_t i = 0; i < want.tensors.size(); ++i) {
      run_on_host(want.operations[i], reference, want.tensors[i]);
    }
    ranks.hosts.run([&](int r) {
      const std::vector<Call> calls = got.calls(r);
      Bytes workspace = workspace_of(calls, n);
      ranks.groups[r]->run(calls, 0, {{}, &flags[r], workspace.data()});
      ranks.groups[r]->check();
    });
  }
  for (int r = 0; r < n; ++r) {
    for (std::size_t i = 0; i < want.tensors.size(); ++i) {
      const Tensors &a = want.tensors[i], &b = got.tensors[i];
      const std::string what = describe(want.operations[i]) + ", part " + std::to_string(i) +
                               ", rank " + std::to_string(r);
      PYCOMM_CHECK(a.y[r] == b.y[r], what + ": result");
      PYCOMM_CHECK(a.residual[r] == b.residual[r], what + ": residual");
      PYCOMM_CHECK(a.velocity[r] == b.velocity[r], what + ": velocity");
    }
    PYCOMM_CHECK(flags[r] == (nonfinite ? 1u : 0u), "nonfinite on rank " + std::to_string(r));
  }
}

Codec codec_of(CodecKind kind, std::int64_t count, std::uint32_t block = 256) {
  return kind == CodecKind::topk   ? top(ceil_div(count, 20), DType::u8)
         : kind == CodecKind::int8 ? int8(block, true)
                                   : cast();
}

// Ring and tree round where slots end, which are larger on the CPU, and where the largest blocks do.
constexpr std::int64_t kOneSlot = 10'000;

// Tensors of many sizes, with an uncompressed one among them. Each begins in another chunk of the whole,
// so that small tensors have different owners.
Operations mixed(CodecKind kind, DType dtype) {
  Operations made;
  const Algorithm algorithms[] = {Algorithm::two_shot, Algorithm::ring, Algorithm::tree};
  for (const std::int64_t count : {4097, 64, 1, 70'001, 0, 9001, 4096, 150'000, 300}) {
    const Algorithm algorithm = kind != CodecKind::int8 || count > kOneSlot
                                    ? Algorithm::two_shot
                                    : algorithms[made.size() % 3];
    const std::uint32_t block = algorithm == Algorithm::two_shot ? 256 : kLargestBlock;
    made.push_back(compressed(algorithm, dtype, codec_of(kind, count, block), count));
    made.back().offset = static_cast<std::uint32_t>(made.size() * kTopkChunk / kSmallestBlock);
  }
  made[5].codec = {};
  return made;
}

void all_sizes(int n, bool together) {
  Ranks ranks(n, together, DeviceWorld::staging_bytes(n));
  World reference(n, kReferenceStaging);
  for (const CodecKind kind : {CodecKind::int8, CodecKind::topk, CodecKind::cast}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      compare(ranks, reference, Contents(mixed(kind, dtype), n));
    }
  }
}

// One tensor overflows, one is used by no rank, one only by the last.
void one_of_each(CodecKind kind) {
  constexpr int kRanks = 2;
  Ranks ranks(kRanks, false, DeviceWorld::staging_bytes(kRanks));
  World reference(kRanks, kReferenceStaging);
  Contents contents(mixed(kind, DType::f32), kRanks);
  contents.set(0, 1, kInfinity);
  for (int r = 0; r < kRanks; ++r) contents.set(3, r, 0);
  contents.set(7, 0, 0);
  compare(ranks, reference, contents, true);
}

// More rows than a launch writes.
void many(CodecKind kind) {
  constexpr int kRanks = 3;
  Ranks ranks(kRanks, false, DeviceWorld::staging_bytes(kRanks));
  World reference(kRanks, kReferenceStaging);
  Operations operations;
  for (std::int64_t i = 0; i < 50; ++i) {
    operations.push_back(
        compressed(Algorithm::two_shot, DType::f32, codec_of(kind, 10 * i), 10 * i));
  }
  compare(ranks, reference, Contents(operations, kRanks));
}

// What the host enqueues does not depend on the number of tensors.
void few_launches(CodecKind kind, int want) {
  World reference(1, kReferenceStaging);
  for (const std::size_t parts : {1, 30}) {
    Ranks ranks(1, false, DeviceWorld::staging_bytes(1));
    const Operations operations(
        parts, compressed(Algorithm::two_shot, DType::f32, codec_of(kind, 1000), 1000));
    const int before = device::enqueued();
    compare(ranks, reference, Contents(operations, 1));
    const int each = (device::enqueued() - before) / 2;  // runs
    PYCOMM_CHECK(each == want, std::to_string(each) + " launches for " + std::to_string(parts));
  }
}

// The lists of all tensors do not fit into the window together.
void too_many_lists() {
  constexpr int kRanks = 2;
  const std::int64_t staging = cuda::least_staging_bytes(kRanks, kLanes);
  Ranks ranks(kRanks, true, staging);
  World reference(kRanks, kReferenceStaging);
  Operations operations;
  std::int64_t bytes = 0;
  while (bytes <= 3 * staging) {
    operations.push_back(
        compressed(Algorithm::two_shot, DType::f32, top(20'000, DType::f32), 100'000));
    bytes += cuda::most_list_bytes(operations.back(), kRanks);
  }
  compare(ranks, reference, Contents(operations, kRanks));
}

// Ranks differ in one tensor in the middle: all say so, and no result is written from there on.
void mismatch(CodecKind kind, bool together) {
  Ranks ranks(2, together, DeviceWorld::staging_bytes(2));
  const Operations operations(
      5, compressed(Algorithm::two_shot, DType::f32, codec_of(kind, 1000), 1000));
  Contents contents(operations, 2);
  const Contents before = contents;
  std::vector<int> mismatches(2);
  ranks.hosts.run([&](int r) {
    std::vector<Call> calls = contents.calls(r);
    if (r == 1) calls[2].operation.tag = 7;
    Bytes workspace = workspace_of(calls, 2);
    try {
      ranks.groups[r]->run(calls, 0, {{}, nullptr, workspace.data()});
      ranks.groups[r]->check();
    } catch (const CollectiveError& error) {
      mismatches[r] = error.reason == Reason::mismatch;
    }
  });
  for (int r = 0; r < 2; ++r) {
    PYCOMM_CHECK(mismatches[r] == 1, "rank " + std::to_string(r) + " reports a mismatch");
    for (std::size_t i = 2; i < operations.size(); ++i) {
      PYCOMM_CHECK(before.tensors[i].y[r] == contents.tensors[i].y[r], "results stay");
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  using pycomm::CodecKind;
  return run_all({
      {"all sizes, 1 rank", [] { all_sizes(1, false); }},
      {"all sizes, 3 ranks together", [] { all_sizes(3, true); }},
      {"all sizes, 2 ranks alone", [] { all_sizes(2, false); }},
      {"int8: one of each", [] { one_of_each(CodecKind::int8); }},
      {"top-k: one of each", [] { one_of_each(CodecKind::topk); }},
      {"int8: many", [] { many(CodecKind::int8); }},
      {"top-k: many", [] { many(CodecKind::topk); }},
      {"int8: few launches", [] { few_launches(CodecKind::int8, 4); }},
      {"top-k: few launches", [] { few_launches(CodecKind::topk, 25); }},
      {"too many lists", too_many_lists},
      {"int8: a mismatch", [] { mismatch(CodecKind::int8, false); }},
      {"top-k: a mismatch", [] { mismatch(CodecKind::topk, false); }},
      {"top-k: a mismatch in a shared launch", [] { mismatch(CodecKind::topk, true); }},
  });
}

// The CUDA kernels, run on the CPU (device/cuda_runtime.h). They must give the bits of the CPU's
// executors, for plain and compressed all-reduces and for encoded tensors. Also how kernels fail.
#include <cmath>
#include <cstring>

#include "core/reduce.h"
#include "cpu/codecs/wire.h"
#include "cuda/codecs/wire.h"
#include "support/device_world.h"
#include "support/dice.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr std::uint32_t kChunkOffset = kTopkChunk / kSmallestBlock;  // Operation::offset

struct Case {
  Operation operation;
  bool momentum = false;
  float poison = 0;
  unsigned seed = 0;
  float scale = 0;  // 0: not scaled
  int unused = 0;   // number of ranks whose tensors are zeros
  bool hold_unused = false;
};

// Too large for an fp16 tensor with feedback, although fp16 can represent it.
constexpr float kTooLarge = 65'200;

// The ranks' tensors, results, residuals and velocities.
template <class T>
struct Tensors {
  std::vector<std::vector<T>> x, y;
  std::vector<std::vector<float>> residual, velocity, residual_before, velocity_before;
  float scale;

  Tensors(int n, const Case& c) : scale(c.scale) {
    const auto size = static_cast<std::size_t>(c.operation.count);
    Dice random(c.seed);
    const auto values = [&](float spread) {
      std::vector<float> made(size);
      for (float& value : made) value = normal(random) * spread;
      return made;
    };
    for (int r = 0; r < n; ++r) {
      x.emplace_back();
      for (float value : values(1)) {
        if (c.seed % 3 == 1) value = std::round(value);  // ties and zeros
        x[r].push_back(store<T>(r < c.unused ? value * 0 : value));
      }
      y.emplace_back(size + 1);
      residual.push_back(values(0.01f));
      velocity.push_back(values(0.1f));
      residual_before.emplace_back(size);
      velocity_before.emplace_back(size);
    }
    if (c.poison != 0 && size > 0) x[n - 1][size / 3] = store<T>(c.poison);
  }

  // Every second case keeps copies of the old residuals.
  Feedback feedback(int r, const Case& c) {
    Feedback made;
    const bool keeps = c.seed % 2 == 0;
    if (c.operation.codec.feedback != 0) {
      made.residual = residual[r].data();
      if (keeps) made.residual_before = residual_before[r].data();
    }
    if (c.momentum) {
      made.velocity = velocity[r].data();
      if (keeps) made.velocity_before = velocity_before[r].data();
    }
    made.momentum = c.momentum ? 0.9f : 0.0f;
    made.seed = 77;
    made.step = 5;
    made.hold_unused = c.hold_unused;
    if (scale != 0) made.scale = &scale;
    return made;
  }
};

template <class V>
bool same(const std::vector<V>& a, const std::vector<V>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(V)) == 0;
}

// Tensors of odd cases are misaligned by one element.
template <class T>
void compare(const Case& c, World& world, DeviceWorld& on_device) {
  const int n = world.size();
  Tensors<T> want(n, c), got = want;
  const std::size_t odd = c.seed % 2;
  bool nonfinite = false;
  world.run([&](int r) {
    const bool told = world[r].run(c.operation, want.x[r].data(), want.y[r].data() + odd, nullptr,
                                   want.feedback(r, c));
    if (r == 0) nonfinite = told;
  });
  Operation operation = c.operation;
  operation.device = Device::cuda;
  std::vector<std::uint32_t> flags(static_cast<std::size_t>(n));
  std::vector<std::vector<std::byte>> workspaces(static_cast<std::size_t>(n));
  for (int r = 0; r < n; ++r) {
    workspaces[r].resize(static_cast<std::size_t>(cuda::workspace_bytes({{operation}}, n)));
    on_device.endpoints[r]->check(operation, got.x[r].data());
    on_device.shared->put(
        r, operation, got.x[r].data(), got.y[r].data() + odd, 0,
        cuda::Bucket{{{operation, got.x[r].data(), got.y[r].data() + odd, got.feedback(r, c)}},
                     &flags[r],
                     workspaces[r].data()});
  }
  on_device.shared->launch();
  const std::string what = describe(operation) + ", seed " + std::to_string(c.seed);
  for (int r = 0; r < n; ++r) {
    PYCOMM_CHECK(on_device.endpoints[r]->failure().reason == Reason::none, what + " failed");
    PYCOMM_CHECK(same(want.y[r], got.y[r]), what + ": result of rank " + std::to_string(r));
    PYCOMM_CHECK(same(want.residual[r], got.residual[r]), what + ": residual");
    PYCOMM_CHECK(same(want.velocity[r], got.velocity[r]), what + ": velocity");
    PYCOMM_CHECK(same(want.residual_before[r], got.residual_before[r]) &&
                     same(want.velocity_before[r], got.velocity_before[r]),
                 what + ": what was before");
    PYCOMM_CHECK((flags[r] != 0) == nonfinite, what + ": nonfinite");
  }
}

void compare(Case c, World& world, DeviceWorld& on_device) {
  switch (c.seed % 3) {
    case 0:
      c.operation.dtype = DType::f32;
      return compare<float>(c, world, on_device);
    case 1:
      c.operation.dtype = DType::f16;
      return compare<Half>(c, world, on_device);
    default:
      c.operation.dtype = DType::bf16;
      return compare<BFloat16>(c, world, on_device);
  }
}

Codec int8(std::uint32_t block, bool stochastic) {
  Codec codec;
  codec.kind = CodecKind::int8;
  codec.block = block;
  codec.stochastic = stochastic ? 1 : 0;
  return codec;
}

Codec cast(DType values) {
  Codec codec;
  codec.kind = CodecKind::cast;
  codec.values = values;
  return codec;
}

Codec top(std::int64_t k, DType values) {
  Codec codec;
  codec.kind = CodecKind::topk;
  codec.k = k;
  codec.values = values;
  return codec;
}

const std::vector<Codec>& block_codecs() {
  static const std::vector<Codec> codecs = {int8(256, false),  int8(128, true),  int8(1024, true),
                                            int8(4096, false), cast(DType::f16), cast(DType::bf16),
                                            cast(DType::f32)};
  return codecs;
}

Operation all_reduce(std::int64_t count, const Codec& codec, unsigned seed) {
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = Algorithm::two_shot;
  operation.op = seed % 2 == 0 ? ReduceOp::avg : ReduceOp::sum;
  operation.count = count;
  operation.codec = codec;
  operation.codec.feedback = seed % 4 < 3 && codec.kind != CodecKind::none ? 1 : 0;
  return operation;
}

void plain(int n) {
  World world(n);
  DeviceWorld zero_copy(n), staged(n, 60, true);
  unsigned seed = 0;
  for (const std::int64_t count : {1, 1000, 70'001}) {
    for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::two_shot}) {
      for (int turn = 0; turn < 3; ++turn) {
        Case c{all_reduce(count, {}, ++seed)};
        c.operation.algorithm = algorithm;
        c.seed = seed;
        compare(c, world, seed % 2 == 0 ? zero_copy : staged);
      }
    }
  }
}

using Buffers = std::vector<std::vector<std::byte>>;

// A tensor per rank, of `size` elements.
Buffers random_tensors(int n, DType dtype, std::size_t size, unsigned seed) {
  Dice random(seed);
  Buffers tensors(static_cast<std::size_t>(n));
  for (auto& tensor : tensors) {
    tensor.resize(size * static_cast<std::size_t>(size_of(dtype)));
    for (std::byte& byte : tensor) byte = static_cast<std::byte>(random());
    for (std::size_t i = 0; dtype == DType::f32 && i < size; ++i) {
      const float value = normal(random);
      std::memcpy(tensor.data() + 4 * i, &value, 4);
    }
  }
  return tensors;
}

// The bits of the CPU's. Tensors of odd seeds are misaligned by one element.
void compare_collective(Operation operation, unsigned seed, World& world, DeviceWorld& on_device) {
  const int n = world.size();
  const std::size_t odd = seed % 2;
  const auto elements = static_cast<std::size_t>(operation.count * n) + odd;
  const Buffers x = random_tensors(n, operation.dtype, elements, seed);
  Buffers want = x, got = x;
  const std::size_t begin = odd * static_cast<std::size_t>(size_of(operation.dtype));
  const auto input = [&](Buffers& results, int r) {
    const Buffers& from = operation.collective == Collective::broadcast ? results : x;
    return const_cast<std::byte*>(from[static_cast<std::size_t>(r)].data()) + begin;
  };
  const auto output = [&](Buffers& results, int r) {
    return results[static_cast<std::size_t>(r)].data() + begin;
  };
  world.run([&](int r) { world[r].run(operation, input(want, r), output(want, r)); });
  operation.device = Device::cuda;
  for (int r = 0; r < n; ++r) {
    on_device.shared->put(r, operation, input(got, r), output(got, r), 0, {});
  }
  on_device.shared->launch();
  for (int r = 0; r < n; ++r) {
    PYCOMM_CHECK(on_device.endpoints[r]->failure().reason == Reason::none, "failed");
    PYCOMM_CHECK(same(want[r], got[r]), describe(operation) + " of rank " + std::to_string(r));
  }
}

// Every other collective, except those of test_device_sharded. The largest tensors take more tiles than there are slots.
void collectives(int n, DType dtype, ReduceOp op) {
  World world(n);
  DeviceWorld zero_copy(n), staged(n, 60, true, cuda::least_staging_bytes(n, kLanes));
  unsigned seed = 0;
  const std::int64_t large = 700'000 / size_of(dtype) + 1;
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1001}, large}) {
    for (int i = 1; i < kCountOf<Collective>; ++i) {
      const auto collective = static_cast<Collective>(i);
      if (stays_in_node(collective)) continue;
      const int root = static_cast<int>(++seed) % n;
      Operation operation{collective, Algorithm::two_shot, dtype, op, root, count};
      if (collective == Collective::barrier) operation.count = 0;
      const bool stages = count == large || seed / 2 % 2 == 0;
      compare_collective(operation, seed, world, stages ? staged : zero_copy);
    }
  }
}

void collectives(int n) {
  collectives(n, DType::f32, ReduceOp::avg);
  collectives(n, DType::i64, ReduceOp::sum);
  collectives(n, DType::i16, ReduceOp::sum);
  collectives(n, DType::i8, ReduceOp::max);
  collectives(n, DType::u8, ReduceOp::bxor);
}

void blocks(int n) {
  World world(n, 2 << 20);
  DeviceWorld on_device(n);
  unsigned seed = 0;
  for (const std::int64_t count : {0, 1, 4099, 16'384, 70'001}) {
    for (const Codec& codec : block_codecs()) {
      Case c{all_reduce(count, codec, ++seed)};
      c.seed = seed;
      const std::int64_t offset = block_of(codec) * (seed % 3 == 0 ? 0 : 1000 + seed);
      c.operation.offset = static_cast<std::uint32_t>(offset / kSmallestBlock);
      c.poison = seed % 7 == 0 ? INFINITY : seed % 11 == 0 ? NAN : seed % 5 == 0 ? kTooLarge : 0.0f;
      compare(c, world, on_device);
    }
  }
}

void lists(int n) {
  World world(n, 2 << 20);
  DeviceWorld on_device(n);
  unsigned seed = 0;
  for (const std::int64_t count : {0, 1, 4099, 65'536, 200'003}) {
    for (const DType values : {DType::f32, DType::bf16, DType::u8}) {
      for (const std::int64_t share : {100, 7}) {
        Case c{all_reduce(count, top(ceil_div(count, share), values), ++seed)};
        c.seed = seed;
        c.momentum = c.operation.codec.feedback != 0 && seed % 2 == 0;
        c.poison = seed % 5 == 0 ? INFINITY : seed % 6 == 1 ? kTooLarge : 0.0f;
        c.operation.offset = kChunkOffset * (seed % 4);  // so that owners vary
        compare(c, world, on_device);
      }
    }
  }
}

// Scaled tensors with feedback, of which some or all are zeros.
void fed(int n) {
  World world(n, 2 << 20);
  DeviceWorld on_device(n);
  unsigned seed = 0;
  for (const Codec& codec : {int8(256, false), int8(128, true), cast(DType::bf16),
                             top(800, DType::f32), top(2000, DType::u8)}) {
    const bool lists = codec.kind == CodecKind::topk;
    for (const float scale : {0.0f, 1024.0f, 0.37f, INFINITY}) {
      for (const int unused : {n - 1, n}) {
        Case c{all_reduce(lists ? 70'001 : 9001, codec, ++seed)};
        c.seed = seed;
        c.scale = scale;
        c.unused = unused;
        c.hold_unused = seed % 5 != 0;
        c.momentum = lists && seed % 3 != 0;
        c.operation.codec.feedback = 1;
        c.operation.offset = kChunkOffset * seed;
        compare(c, world, on_device);
      }
    }
  }
}

template <class T>
void encode_and_decode(DType dtype, std::int64_t n, const Codec& codec) {
  Case c;
  c.operation.count = n;
  c.seed = static_cast<unsigned>(n) % 4;
  Tensors<T> tensors(1, c);
  auto* const x = reinterpret_cast<std::byte*>(tensors.x[0].data());
  const std::string what = describe(codec) + " from and to " + name_of(dtype);
  const std::int64_t bytes = encoded_bytes(codec, n);
  std::vector<std::uint32_t> want(static_cast<std::size_t>(bytes) / 4 + 1), got = want;
  std::vector<std::byte> workspace(static_cast<std::size_t>(cuda::workspace_bytes(codec, n)) + 4);
  cuda::WireJob job;
  job.codec = codec;
  job.dtype = dtype;
  job.n = n;
  job.elements = x;
  job.wire = reinterpret_cast<std::byte*>(got.data());
  job.workspace = workspace.data();
  job.random = {9, 8, 0};
  for (const Places places : {Places{1000}, places_of(1024, 16'384, 49'152)}) {
    job.places = places;
    cpu::encode(codec, dtype, x, n, reinterpret_cast<std::byte*>(want.data()), job.random, places);
    cuda::encode(job);
    PYCOMM_CHECK(same(want, got), "encoded: " + what);
  }
  for (const bool add : {false, true}) {
    if (add && dtype != DType::f32) continue;  // only sums in fp32 are offered
    std::vector<T> a = tensors.x[0], b = a;
    cpu::decode(codec, job.wire, bytes, n, dtype, a.data(), add);
    job.elements = reinterpret_cast<std::byte*>(b.data());
    const bool checks = n % 2 == 0;
    cuda::decode(job, bytes, add, checks);
    PYCOMM_CHECK(same(a, b), "decoded: " + what);
  }
}

template <class T>
void wires(DType dtype) {
  for (const std::int64_t n : {0, 1, 15, 4097, 65'536, 140'001}) {
    for (const Codec& codec : block_codecs()) encode_and_decode<T>(dtype, n, codec);
    for (const DType values : {DType::f32, DType::bf16, DType::u8}) {
      encode_and_decode<T>(dtype, n, top(ceil_div(n, 30), values));
    }
  }
}

// One of three ranks never comes: the others' kernels end and write no memory of the caller.
void drains(const Codec& codec) {
  constexpr std::int64_t kCount = 70'000;
  DeviceWorld world(3, 0.2);
  const Case c{all_reduce(kCount, codec, 0), codec.kind == CodecKind::topk};
  Tensors<float> before(2, c), after = before;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        std::vector<std::byte> workspace(
            static_cast<std::size_t>(cuda::workspace_bytes({{c.operation}}, 3)));
        world.endpoints[r]->launch(c.operation, after.x[r].data(), after.y[r].data(), 0,
                                   cuda::Bucket{{{c.operation, after.x[r].data(), after.y[r].data(),
                                                  after.feedback(r, c)}},
                                                nullptr,
                                                workspace.data()});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (int r = 0; r < 2; ++r) {
    const cuda::Failure failure = world.endpoints[r]->failure();
    PYCOMM_CHECK(failure.reason == Reason::timeout && failure.rank == 2, "a timeout of rank 2");
    PYCOMM_CHECK(rank_of(failure.abort_word) == 2 && waiter_of(failure.abort_word) == r &&
                     seconds_of(failure.abort_word) == 0.2,
                 "for which this rank has waited");
    PYCOMM_CHECK(same(before.y[r], after.y[r]) && same(before.residual[r], after.residual[r]) &&
                     same(before.velocity[r], after.velocity[r]),
                 "tensors of a failed operation stay");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"plain, 2 ranks", [] { plain(2); }},
      {"plain, 3 ranks", [] { plain(3); }},
      {"collectives, 2 ranks", [] { collectives(2); }},
      {"collectives, 3 ranks", [] { collectives(3); }},
      {"int8 and casts, alone", [] { blocks(1); }},
      {"int8 and casts, 2 ranks", [] { blocks(2); }},
      {"int8 and casts, 3 ranks", [] { blocks(3); }},
      {"top-k, alone", [] { lists(1); }},
      {"top-k, 2 ranks", [] { lists(2); }},
      {"top-k, 3 ranks", [] { lists(3); }},
      {"scaled and unused tensors, alone", [] { fed(1); }},
      {"scaled and unused tensors, 2 ranks", [] { fed(2); }},
      {"scaled and unused tensors, 3 ranks", [] { fed(3); }},
      {"encoded fp32", [] { wires<float>(pycomm::DType::f32); }},
      {"encoded fp16", [] { wires<pycomm::Half>(pycomm::DType::f16); }},
      {"encoded bf16", [] { wires<pycomm::BFloat16>(pycomm::DType::bf16); }},
      {"a missing rank",
       [] {
         for (const auto& codec : {int8(256, false), top(700, pycomm::DType::f32)}) drains(codec);
       }},
  });
}

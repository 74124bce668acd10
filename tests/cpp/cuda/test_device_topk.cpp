// Top-k's kernels, run on the CPU, with tensors that are hard to select from. They must give the bits of
// the CPU's executor.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>

#include "cpu/codecs/wire.h"
#include "cuda/codecs/scan.cuh"
#include "cuda/codecs/topk.cuh"
#include "cuda/codecs/wire.h"
#include "cuda/runtime.cuh"
#include "support/device_world.h"
#include "support/dice.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

using Values = std::vector<float>;

struct Shape {
  const char* name;
  // Element i of n; k are selected.
  float (*value)(std::int64_t i, std::int64_t n, std::int64_t k, Dice& dice);
};

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"normal", [](std::int64_t, std::int64_t, std::int64_t, Dice& dice) { return normal(dice); }},
      {"all equal", [](std::int64_t, std::int64_t, std::int64_t, Dice&) { return -1.5f; }},
      {"all zero", [](std::int64_t, std::int64_t, std::int64_t, Dice&) { return -0.0f; }},
      {"few values", [](std::int64_t, std::int64_t, std::int64_t,
                        Dice& dice) { return static_cast<float>(roll(dice, 5) - 2); }},
      {"fewer than k that are not zero", [](std::int64_t i, std::int64_t n, std::int64_t k,
                                            Dice&) { return i % (2 * n / k) == 0 ? 3.0f : 0.0f; }},
      {"ascending",
       [](std::int64_t i, std::int64_t, std::int64_t, Dice&) { return static_cast<float>(i); }},
      {"descending", [](std::int64_t i, std::int64_t n, std::int64_t,
                        Dice&) { return static_cast<float>(i - n); }},
      {"one large block",
       [](std::int64_t i, std::int64_t n, std::int64_t k, Dice& dice) {
         return normal(dice) * (i >= n / 3 && i < n / 3 + 2 * k ? 1e30f : 1e-30f);
       }},
      {"large at the end", [](std::int64_t i, std::int64_t n, std::int64_t k,
                              Dice& dice) { return normal(dice) * (i >= n - k ? 1e10f : 1.0f); }},
      {"equal ones in chunks of one owner of three",
       [](std::int64_t i, std::int64_t, std::int64_t, Dice&) {
         const std::int64_t chunk = i / kTopkChunk;
         return chunk % 3 == 0 && i % (chunk == 0 ? 50 : 5) == 0 ? 1.0f : 0.0f;
       }},
      {"a few are larger, all others equal",
       [](std::int64_t i, std::int64_t n, std::int64_t k, Dice&) {
         return i % (3 * n / k) == 1 ? 2.0f + static_cast<float>(i) : 1.0f;
       }},
      {"subnormal and signed",
       [](std::int64_t, std::int64_t, std::int64_t, Dice& dice) { return normal(dice) * 1e-40f; }},
      {"infinities and NaN",
       [](std::int64_t i, std::int64_t, std::int64_t, Dice& dice) {
         return i % 101 == 7   ? (i % 2 == 0 ? INFINITY : -INFINITY)
                : i % 977 == 5 ? NAN
                               : normal(dice);
       }},
      {"one infinity", [](std::int64_t i, std::int64_t n, std::int64_t,
                          Dice& dice) { return i == n / 2 ? INFINITY : normal(dice); }},
  };
  return all;
}

// The tensors of a shape, misaligned by an element where `odd`.
template <class T>
std::vector<T> tensor(const Shape& shape, std::int64_t n, std::int64_t k, unsigned seed) {
  Dice dice(seed);
  std::vector<T> made(1);
  for (std::int64_t i = 0; i < n; ++i) made.push_back(store<T>(shape.value(i, n, k, dice)));
  return made;
}

template <class V>
bool same(const std::vector<V>& a, const std::vector<V>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(V)) == 0;
}

template <class T>
void select(DType dtype, const char* name, const T* first, std::int64_t n, std::int64_t k) {
  Codec codec;
  codec.kind = CodecKind::topk;
  codec.k = k;
  cuda::WireJob job;
  job.codec = codec;
  job.dtype = dtype;
  job.n = n;
  job.elements = reinterpret_cast<std::byte*>(const_cast<T*>(first));
  std::vector<std::byte> workspace(static_cast<std::size_t>(cuda::workspace_bytes(codec, n)),
                                   std::byte{0xcd});
  job.workspace = workspace.data();
  std::vector<std::int64_t> indices(static_cast<std::size_t>(k));
  Values values(static_cast<std::size_t>(k));
  const std::int64_t found = cuda::select(job, indices.data(), values.data());
  const std::vector<cpu::Entry> want = cpu::select(dtype, first, n, k);
  bool right = found == static_cast<std::int64_t>(want.size());
  for (std::size_t i = 0; right && i < want.size(); ++i) {
    right = indices[i] == want[i].index && std::memcmp(&values[i], &want[i].value, 4) == 0;
  }
  PYCOMM_CHECK(right, std::string(name) + ": " + std::to_string(k) + " of " + std::to_string(n) +
                          " as " + name_of(dtype));
}

template <class T>
void select(DType dtype, const Shape& shape, std::int64_t n, std::int64_t k, unsigned seed) {
  const std::vector<T> x = tensor<T>(shape, n, k, seed);
  const std::int64_t odd = seed % 2;
  select(dtype, shape.name, x.data() + odd, n - odd, k);
}

// All large elements are in the sample, so that it promises several times as many.
void misled() {
  constexpr std::int64_t kElements = 70'001;
  Dice dice(3);
  Values x(kElements, 1e-3f);
  const std::int64_t octets = cuda::TopkScratch::samples_of(kElements) / cuda::kOctet;
  for (std::int64_t i = 0; i < octets; ++i) {
    const std::int64_t at = cuda::TopkScratch::sampled_octet(i, kElements) * cuda::kOctet;
    for (int e = 0; e < cuda::kOctet; ++e) x[static_cast<std::size_t>(at + e)] = normal(dice);
  }
  for (const std::int64_t k : {700, 3000}) select(DType::f32, "misled", x.data(), kElements, k);
}

void selections() {
  unsigned seed = 0;
  for (const Shape& shape : shapes()) {
    for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {5000, 17}, {5000, 4000}, {70'001, 700}, {70'001, 20'000}}) {
      switch (seed++ % 3) {
        case 0:
          select<float>(DType::f32, shape, n, k, seed);
          break;
        case 1:
          select<Half>(DType::f16, shape, n, k, seed);
          break;
        default:
          select<BFloat16>(DType::bf16, shape, n, k, seed);
      }
    }
  }
}

// The least and the most of everything, and tiles and sections that end within a lane's elements.
void edges() {
  unsigned seed = 0;
  for (const Shape& shape : shapes()) {
    for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
             {1, 1}, {1023, 1023}, {1025, 1}, {4099, 4098}, {66'563, seed % 3 == 0 ? 1 : 66'562}}) {
      select<float>(DType::f32, shape, n, k, seed++);
    }
  }
}

// In some of these, ranks have more elements for an owner than its list takes, so the list is cut.
void exchange(int ranks, const Shape& shape, std::int64_t n, std::int64_t k, World& world,
              DeviceWorld& on_device, unsigned seed) {
  Operation operation;
  operation.collective = Collective::all_reduce;
  operation.algorithm = Algorithm::two_shot;
  operation.op = seed % 2 == 0 ? ReduceOp::avg : ReduceOp::sum;
  operation.dtype = DType::f32;
  operation.count = n;
  operation.codec.kind = CodecKind::topk;
  operation.codec.k = k;
  operation.codec.values = seed % 3 == 0 ? DType::u8 : DType::f32;
  operation.codec.feedback = 1;
  std::vector<Values> x, want, got, residual, residual_want, workspace;
  for (int r = 0; r < ranks; ++r) {
    const auto size = static_cast<std::size_t>(n);
    const unsigned of_rank = seed + static_cast<unsigned>(r);
    x.push_back(tensor<float>(shape, n, k, of_rank));
    residual.push_back(tensor<float>(shapes()[of_rank % 4], n, k, of_rank));
    workspace.emplace_back(
        static_cast<std::size_t>(cuda::workspace_bytes({{operation}}, ranks)) / 4 + 1);
    want.emplace_back(size);
  }
  got = want;
  residual_want = residual;
  world.run([&](int r) {
    Feedback feedback;
    feedback.hold_unused = true;
    feedback.residual = residual_want[r].data();
    world[r].run(operation, x[r].data(), want[r].data(), nullptr, feedback);
  });
  operation.device = Device::cuda;
  for (int r = 0; r < ranks; ++r) {
    Feedback feedback;
    feedback.hold_unused = true;
    feedback.residual = residual[r].data();
    on_device.endpoints[r]->check(operation, x[r].data());
    on_device.shared->put(r, operation, x[r].data(), got[r].data(), 0,
                          cuda::Bucket{{{operation, x[r].data(), got[r].data(), feedback}},
                                       nullptr,
                                       reinterpret_cast<std::byte*>(workspace[r].data())});
  }
  on_device.shared->launch();
  for (int r = 0; r < ranks; ++r) {
    const std::string what = std::string(shape.name) + ", rank " + std::to_string(r);
    PYCOMM_CHECK(on_device.endpoints[r]->failure().reason == Reason::none, what + " failed");
    PYCOMM_CHECK(same(want[r], got[r]), what + ": result");
    PYCOMM_CHECK(same(residual_want[r], residual[r]), what + ": residual");
  }
}

// An operation that has work for the first lane only; the others must count it, too.
void run_one_lane(int ranks, DeviceWorld& on_device) {
  Operation operation{Collective::all_reduce, Algorithm::two_shot, DType::f32};
  operation.count = 4;
  operation.device = Device::cuda;
  std::vector<Values> x(static_cast<std::size_t>(ranks), Values(4, 1.0f));
  for (int r = 0; r < ranks; ++r) {
    on_device.shared->put(r, operation, x[r].data(), x[r].data(), 0, {});
  }
  on_device.shared->launch();
  for (const Values& sum : x) {
    PYCOMM_CHECK(sum == Values(4, static_cast<float>(ranks)), "a small tensor between lists");
  }
}

void exchanges(int ranks) {
  constexpr std::int64_t kElements = 3 * kTopkChunk + 5000;
  World world(ranks, 4 << 20);
  DeviceWorld on_device(ranks);
  unsigned seed = 0;
  for (const Shape& shape : shapes()) {
    run_one_lane(ranks, on_device);
    exchange(ranks, shape, kElements, 2200, world, on_device, ++seed);
  }
}

struct Scan {
  std::int64_t n;
  const std::uint64_t* numbers;
  std::uint64_t* sums;
};

__global__ void scan_numbers(const __grid_constant__ Scan scan) {
  const std::uint64_t total = cuda::scan_all(
      scan.n, [&](std::int64_t i) { return scan.numbers[i]; },
      [&](std::int64_t i, std::uint64_t before) { scan.sums[i] = before; });
  if (threadIdx.x == 0) scan.sums[scan.n] = total;
}

void scans() {
  Dice dice(1);
  for (const std::int64_t n : {0, 1, 4095, 4096, 4097, 10'000}) {
    std::vector<std::uint64_t> numbers, want = {0};
    for (std::int64_t i = 0; i < n; ++i) {
      numbers.push_back(dice());
      want.push_back(want.back() + numbers.back());
    }
    std::vector<std::uint64_t> sums(want.size());
    cuda::launch_blocks<&scan_numbers>(1, Scan{n, numbers.data(), sums.data()}, nullptr);
    PYCOMM_CHECK(same(want, sums), "prefix sums of " + std::to_string(n) + " numbers");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"prefix sums", scans},
      {"selections", selections},
      {"edges", edges},
      {"a misleading sample", misled},
      {"exchanges, 3 ranks", [] { exchanges(3); }},
  });
}

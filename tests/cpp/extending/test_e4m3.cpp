// The codec of docs/contributing/extending.md, which is not in the library, on both executors.
// Two-shot must give the bits of a reference that searches the table of all e4m3 numbers. Ring and
// tree may round more often, but lose nothing with feedback.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/algorithms/run.h"
#include "cpu/codecs/block_loops.h"
#include "cpu/codecs/coded_comm.h"
#include "cuda/launch.h"
#include "extending/ranks.h"
#include "extending/table.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using Tensor = std::vector<float>;

// The number that the format assigns to a payload without its sign.
double number(int payload) {
  const int exponent = payload / 8, mantissa = payload % 8;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

double nearest_number(double x) {
  const double size = std::fabs(x);
  int best = 0;
  for (int payload = 1; payload <= 0x7e; ++payload) {
    const double off = std::fabs(number(payload) - size), least = std::fabs(number(best) - size);
    if (off < least || (off == least && payload % 2 == 0)) best = payload;
  }
  return std::copysign(number(best), x);
}

// A tensor after encoding in blocks and decoding.
Tensor through_codec(const Tensor& x, std::size_t block) {
  Tensor y;
  for (std::size_t start = 0; start < x.size(); start += block) {
    const std::size_t end = std::min(start + block, x.size());
    float most = 0;
    for (std::size_t i = start; i < end; ++i) most = std::max(most, std::fabs(x[i]));
    const float scale = most / 448.0f, inverse = most > 0 ? 448.0f / most : 0.0f;
    for (std::size_t i = start; i < end; ++i) {
      y.push_back(static_cast<float>(nearest_number(x[i] * inverse)) * scale);
    }
  }
  return y;
}

Tensor two_shot_of(const std::vector<Tensor>& x, ReduceOp op, std::size_t block) {
  Tensor sum = through_codec(x[0], block);
  for (std::size_t r = 1; r < x.size(); ++r) {
    const Tensor next = through_codec(x[r], block);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += next[i];
  }
  for (float& value : sum) value /= op == ReduceOp::avg ? static_cast<float>(x.size()) : 1.0f;
  return through_codec(sum, block);
}

Operation all_reduce(Algorithm algorithm, ReduceOp op, std::int64_t count, std::uint32_t block) {
  Operation operation{Collective::all_reduce, algorithm, DType::f32, op, 0, count};
  operation.codec.kind = kE4m3;
  operation.codec.block = block;
  return operation;
}

// Little staging, so that slots wrap around many times.
std::int64_t small_staging(int n) {
  return 2 * kStagingSlots * (n + 1) * kLargestBlock * 2 * DeviceRanks::kLanes;
}

// An all-reduce of one tensor per rank, in place.
void run(CpuRanks& ranks, const Operation& operation, std::vector<Tensor>& x,
         std::vector<Feedback>& feedback) {
  ranks.run([&](cpu::Comm& comm, std::size_t r) {
    Operation announced = operation;  // must have a codec that the library knows
    announced.codec.kind = CodecKind::int8;
    comm.begin(announced, x[r].data(), x[r].data(), nullptr);
    const auto staging = CodedStaging::in(comm.slot_bytes() * kStagingSlots, operation.codec);
    cpu::CodedComm<cpu::Comm> coded(
        comm, operation, feedback[r], kInfinity, staging,
        cpu::block_loops<CodecsAndE4m3>(operation.dtype, operation.codec));
    run_coded(coded, operation);
    comm.finish();
  });
}

void run(DeviceRanks& ranks, const Operation& operation, std::vector<Tensor>& x,
         std::vector<Feedback>& feedback) {
  for (std::size_t r = 0; r < x.size(); ++r) {
    ranks.put(r, operation, x[r].data(), x[r].data(), feedback[r]);
  }
  ranks.run([&](const cuda::Launch& plain) {
    const cuda::CodedLaunch launch = cuda::prepare(plain, ranks.buckets(), nullptr);
    if (feedback[0].residual != nullptr) cuda::launch_preflight(launch, nullptr);
    Algorithms::visit(operation.algorithm, launch.layout.ranks, [&](auto row) {
      if constexpr (row.kCoded) cuda::launch_coded<decltype(row), CodecsAndE4m3>(launch, nullptr);
    });
  });
}

// Values of many sizes, so that a block has numbers with all exponents; one block is zero. In most
// blocks the largest value is 448 and the others are integers, many of which lie between two e4m3
// numbers.
float value(std::size_t r, std::size_t i, int round) {
  const auto seed = static_cast<int>(i * 7 + r * 31) + round * 13;
  if (seed % 11 == 0 || i / 1024 == 1) return 0;
  const std::size_t block = i / 128;
  if (block % 3 == 0) return std::ldexp(static_cast<float>(seed % 101 - 50), -(seed % 17));
  return i % 128 == 0 ? 448.0f : static_cast<float>(seed % 897 - 448);
}

std::vector<Tensor> tensors(std::size_t n, std::int64_t count, int round) {
  std::vector<Tensor> x(n);
  for (std::size_t r = 0; r < n; ++r) {
    for (std::int64_t i = 0; i < count; ++i) {
      x[r].push_back(value(r, static_cast<std::size_t>(i), round));
    }
  }
  return x;
}

std::string at(std::size_t i, const Tensor& x, std::size_t r, float is) {
  return "element " + std::to_string(i) + " of " + std::to_string(x.size()) + " on rank " +
         std::to_string(r) + " is " + std::to_string(is);
}

template <class Ranks>
void exact(int n, const std::vector<std::int64_t>& counts) {
  Ranks ranks(n, small_staging(n));
  int round = 0;
  for (const std::int64_t count : counts) {
    for (const std::uint32_t block : {128u, 1024u, 4096u}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg}) {
        std::vector<Tensor> x = tensors(static_cast<std::size_t>(n), count, ++round);
        const Tensor expected = two_shot_of(x, op, block);
        std::vector<Feedback> none(x.size());
        run(ranks, all_reduce(Algorithm::two_shot, op, count, block), x, none);
        for (std::size_t r = 0; r < x.size(); ++r) {
          for (std::size_t i = 0; i < expected.size(); ++i) {
            PYCOMM_CHECK(x[r][i] == expected[i], at(i, expected, r, x[r][i]) + " instead of " +
                                                     std::to_string(expected[i]));
          }
        }
      }
    }
  }
}

template <class Ranks>
void nothing_is_lost(int n, std::int64_t count) {
  Ranks ranks(n, small_staging(n));
  for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
    std::vector<Tensor> x = tensors(static_cast<std::size_t>(n), count, 0);
    std::vector<double> left(static_cast<std::size_t>(count));
    for (const Tensor& tensor : x) {
      for (std::size_t i = 0; i < left.size(); ++i) left[i] += static_cast<double>(tensor[i]);
    }
    std::vector<Tensor> residuals(x.size(), Tensor(left.size()));
    std::vector<Feedback> feedback(x.size());
    for (std::size_t r = 0; r < x.size(); ++r) feedback[r].residual = residuals[r].data();
    Operation operation = all_reduce(algorithm, ReduceOp::sum, count, 256);
    operation.codec.feedback = 1;
    run(ranks, operation, x, feedback);
    for (std::size_t i = 0; i < left.size(); ++i) {
      for (const Tensor& residual : residuals) left[i] -= static_cast<double>(residual[i]);
      for (std::size_t r = 0; r < x.size(); ++r) {
        PYCOMM_CHECK(std::memcmp(&x[r][i], &x[0][i], 4) == 0, "ranks differ");
        PYCOMM_CHECK(std::fabs(left[i] - static_cast<double>(x[r][i])) < 1e-3,
                     at(i, x[r], r, x[r][i]) + " instead of " + std::to_string(left[i]) + ", " +
                         name_of(algorithm));
      }
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests;
  for (int n = 1; n <= 4; ++n) {
    tests.push_back({"threads", [n] { exact<CpuRanks>(n, {0, 1, 4099, 50'021}); }});
    tests.push_back({"a kernel", [n] { exact<DeviceRanks>(n, {1, 10'007}); }});
    tests.push_back({"threads, feedback", [n] { nothing_is_lost<CpuRanks>(n, 50'021); }});
    tests.push_back({"a kernel, feedback", [n] { nothing_is_lost<DeviceRanks>(n, 10'007); }});
  }
  return run_all(tests);
}

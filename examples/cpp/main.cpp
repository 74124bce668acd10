// Four threads average their tensors in a ring, then in 8 bits; a plain loop checks both results.
#include <pycomm/cpu/group/local_world.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

constexpr int kRanks = 4;
constexpr std::int64_t kCount = 100'003;

using Tensor = std::vector<float>;

// Averages on a thread per rank; returns the largest error of all elements and ranks.
float largest_error(const pycomm::Operation& average, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> outputs(kRanks, Tensor(kCount));
  pycomm::cpu::LocalWorld world(kRanks);
  world.run([&](int rank) { world[rank].run(average, inputs[rank].data(), outputs[rank].data()); });
  float largest = 0;
  for (std::int64_t i = 0; i < kCount; ++i) {
    float sum = 0;
    for (const Tensor& input : inputs) sum += input[i];
    for (const Tensor& output : outputs) {
      largest = std::max(largest, std::abs(output[i] - sum / kRanks));
    }
  }
  return largest;
}

int main() {
  std::vector<Tensor> inputs(kRanks, Tensor(kCount));
  for (int r = 0; r < kRanks; ++r) {
    for (std::int64_t i = 0; i < kCount; ++i) inputs[r][i] = std::sin(float(i * (r + 1)));
  }

  pycomm::Operation average{.collective = pycomm::Collective::all_reduce,
                            .algorithm = pycomm::Algorithm::ring,
                            .dtype = pycomm::DType::f32,
                            .op = pycomm::ReduceOp::avg,
                            .count = kCount};
  const float exact = largest_error(average, inputs);

  average.algorithm = pycomm::Algorithm::two_shot;  // rounds each element twice, however many ranks
  average.codec = {.kind = pycomm::CodecKind::int8, .block = 256};
  const float rounded = largest_error(average, inputs);

  std::printf("largest error: %.1g, in 8 bits %.1g\n", exact, rounded);
  return exact < 1e-6f && rounded > 0 && rounded < 2.01f / 254 ? 0 : 1;
}

// Random numbers of tests.
#pragma once

#include <cstdint>
#include <limits>

namespace pycomm::test {

// SplitMix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators). With
// std::mt19937 and std::normal_distribution, some tests spent a third of their time on random numbers.
class Dice {
 public:
  using result_type = std::uint64_t;

  explicit Dice(std::uint64_t seed) : state_(seed) {}

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return std::numeric_limits<result_type>::max(); }

  result_type operator()() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

inline std::int64_t roll(Dice& dice, std::int64_t sides) {
  return static_cast<std::int64_t>(dice() % static_cast<std::uint64_t>(sides));
}

// Distributed almost normally, with a standard deviation of 1: the sum of four uniform numbers.
inline float normal(Dice& dice) {
  constexpr double kOne = 4294967296.0, kDeviation = 0.57735026918962576 * kOne;
  const std::uint64_t a = dice(), b = dice(), low = 0xffffffffu;
  const std::uint64_t sum = (a & low) + (a >> 32) + (b & low) + (b >> 32);
  return static_cast<float>((static_cast<double>(sum) - 2 * kOne) / kDeviation);
}

}  // namespace pycomm::test

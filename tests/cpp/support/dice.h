// Random choices of tests.
#pragma once

#include <cstdint>
#include <random>

namespace pycomm::test {

using Dice = std::mt19937;

inline std::int64_t roll(Dice& dice, std::int64_t sides) {
  return static_cast<std::int64_t>(dice() % static_cast<std::uint64_t>(sides));
}

}  // namespace pycomm::test

// Second moments in fp16, stored as square roots, which have the range of gradients. The moments
// themselves would underflow: fp16's smallest number, 6e-8, is the square of 2.4e-4.
#pragma once

#include <cmath>

#include "core/optim/rounding.h"
#include "core/reduce.h"

namespace pycomm {

PYCOMM_HD float load_root(std::uint32_t bits) {
  const float root = half_to_float(static_cast<std::uint16_t>(bits));
  return root * root;
}

// Rounds stochastically, so that the expectation of the square is the value. A value above zero
// does not become zero, because steps are divided by the root. A finite value stays finite, because
// an average that is infinite once stays infinite.
PYCOMM_HD Half store_root(float value, std::uint32_t random) {
  const float root = std::sqrt(value);
  const bool subnormal = root < 0x1p-14f;
  const auto units = static_cast<std::uint32_t>((subnormal ? root : 0.0f) * 0x1p24f);
  const std::uint32_t cut =
      subnormal ? units : (bit_cast<std::uint32_t>(root) >> 13) - (112u << 10);
  const std::uint32_t below = cut < 0x7bffu ? cut : 0x7bffu;
  const float nearest = load_root(below);
  const bool up = rounds_up(value - nearest, load_root(below + 1) - nearest, random);
  const std::uint32_t bits = up || (below == 0 && value > 0.0f) ? below + 1 : below;
  const std::uint32_t endless = value == value ? 0x7c00u : 0x7e00u;
  return {static_cast<std::uint16_t>(value - value == 0.0f ? bits : endless)};
}

}  // namespace pycomm

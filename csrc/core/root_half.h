// Second moments in fp16: as their square roots, which have the range of gradients. The moments
// themselves would underflow: 6e-8, fp16's least, is the square of 2.4e-4.
#pragma once

#include <cmath>

#include "core/reduce.h"

namespace pycomm {

// Above zero stays above zero, because steps are divided by the root.
PYCOMM_HD Half store_root(float value) {
  const Half root = store<Half>(std::sqrt(value));
  return {static_cast<std::uint16_t>(value > 0.0f && root.bits == 0 ? 1 : root.bits)};
}

PYCOMM_HD float load_root(Half root) {
  const float value = load(root);
  return value * value;
}

}  // namespace pycomm

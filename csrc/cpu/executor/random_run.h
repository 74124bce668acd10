// Random bits for many elements at once.
#pragma once

#include "core/rng.h"

namespace pycomm::cpu {

// The random bits of a whole run of kRandomRun elements that begins at element `first`.
PYCOMM_HD void random_run(const Random& random, std::int64_t first, std::uint32_t* to) {
  const auto counter = static_cast<std::uint64_t>(first / 4);
#pragma omp simd
  for (std::int64_t c = 0; c < 64; ++c) {
    const RandomWords words = philox(random, counter + static_cast<std::uint64_t>(c));
    to[c] = words.word[0];
    to[64 + c] = words.word[1];
    to[128 + c] = words.word[2];
    to[192 + c] = words.word[3];
  }
}

}  // namespace pycomm::cpu

// Counter-based random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
// numbers: as easy as 1, 2, 3"). There is no state: an element's bits depend only on seed, step,
// stream and index, not on who asks for them, in which order or in which pieces.
#pragma once

#include "core/types.h"

namespace pycomm {

struct Random {
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  std::uint32_t stream = 0;  // the rank whose contribution is rounded, or kResultStream
};
inline constexpr std::uint32_t kResultStream = 0xffffffffu;

// The number of elements whose bits come from one run of 64 counters. Each counter gives four
// words; word w of counter c belongs to element w * 64 + c, so that vector lanes compute
// neighbouring elements.
inline constexpr std::int64_t kRandomRun = 256;

struct RandomWords {
  std::uint32_t word[4];
};

PYCOMM_HD RandomWords philox(const Random& random, std::uint64_t counter) {
  std::uint32_t a = static_cast<std::uint32_t>(counter);
  std::uint32_t b = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c = random.step, d = random.stream;
  std::uint32_t key = static_cast<std::uint32_t>(random.seed);
  std::uint32_t other = static_cast<std::uint32_t>(random.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xd2511f53u} * a;
    const std::uint64_t second = std::uint64_t{0xcd9e8d57u} * c;
    a = static_cast<std::uint32_t>(second >> 32) ^ b ^ key;
    b = static_cast<std::uint32_t>(second);
    c = static_cast<std::uint32_t>(first >> 32) ^ d ^ other;
    d = static_cast<std::uint32_t>(first);
    key += 0x9e3779b9u;
    other += 0xbb67ae85u;
  }
  return {{a, b, c, d}};
}

// The random bits of the element at `index` in the whole tensor.
PYCOMM_HD std::uint32_t random_bits(const Random& random, std::int64_t index) {
  const std::int64_t run = index / kRandomRun, place = index % kRandomRun;
  const RandomWords words =
      philox(random, static_cast<std::uint64_t>(run * (kRandomRun / 4) + place % 64));
  // Not word[place / 64]: for an index that is known only at run time, a GPU keeps the words in memory.
  const std::uint32_t low = place < 64 ? words.word[0] : words.word[1];
  const std::uint32_t high = place < 192 ? words.word[2] : words.word[3];
  return place < 128 ? low : high;
}

// The random bits for rounding in optimizers. A Philox key per 1024 elements is mixed with the
// element's position by multiplications and shifts (lowbias32: Wellons 2018, "Prospecting for hash
// functions"; its last step, the exclusive or of both halves, is left to rounding_bits()). This takes
// a sixth of Philox's time, which would be half of an optimizer step's.
inline constexpr std::int64_t kMixedRun = 1024;

struct MixedBits {
  std::uint32_t first = 0, second = 0;

  MixedBits() = default;
  // The key of the run that contains element `at`.
  PYCOMM_HD MixedBits(const Random& random, std::int64_t at) {
    const RandomWords key = philox(random, static_cast<std::uint64_t>(at / kMixedRun));
    first = key.word[0];
    second = key.word[1];
  }

  // The bits of the element at `place` in the run.
  PYCOMM_HD std::uint32_t operator()(std::int64_t place) const {
    std::uint32_t bits = first + static_cast<std::uint32_t>(place);
    bits = (bits ^ bits >> 16) * 0x7feb352du;
    return (bits ^ bits >> 15 ^ second) * 0x846ca68bu;
  }
};

}  // namespace pycomm

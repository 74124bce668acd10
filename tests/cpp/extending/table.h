// The row of star, in a table of its own, because the enum does not have it.
#pragma once

#include "core/algorithms/table.h"
#include "extending/star.h"

namespace pycomm {

inline constexpr Algorithm kStar{kCountOf<Algorithm>};

struct Star {
  static constexpr Algorithm kAlgorithm = kStar;
  static constexpr bool kZeroCopy = false, kCoded = false, kPartialSums = false;
  template <PlainExecutor Comm>
  PYCOMM_HD static void run(Comm& comm) {
    star(comm);
  }
};

using AlgorithmsAndStar = Algorithms::With<Star>;
static_assert(AlgorithmsAndStar::kCount == Algorithms::kCount + 1);

}  // namespace pycomm

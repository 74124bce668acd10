// The rows of star and e4m3, in tables of their own, because the enums do not have them.
#pragma once

#include "core/algorithms/table.h"
#include "core/codecs/table.h"
#include "extending/e4m3.h"
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

inline constexpr CodecKind kE4m3{kCountOf<CodecKind>};

struct E4m3Codec {
  static constexpr CodecKind kKind = kE4m3;
  using Elements = TypeList<E4m3Elements>;
  PYCOMM_HD static int choice(const Codec&) { return 0; }
};

using CodecsAndE4m3 = BlockCodecs::With<E4m3Codec>;

}  // namespace pycomm

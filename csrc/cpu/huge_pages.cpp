#include "cpu/huge_pages.h"

#include <sys/mman.h>

#include "core/layout.h"

namespace pycomm::cpu {

void advise_huge_pages(void* data, std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::int64_t kHugePage = 2 << 20;
  const auto begin = reinterpret_cast<std::intptr_t>(data);
  const std::int64_t first = round_up(begin, kHugePage);
  const std::int64_t whole = (begin + bytes - first) / kHugePage * kHugePage;
  if (whole > 0) (void)madvise(reinterpret_cast<void*>(first), whole, MADV_HUGEPAGE);
#endif
}

}  // namespace pycomm::cpu

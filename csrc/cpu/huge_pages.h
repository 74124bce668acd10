// Pages of 2 MiB for large arrays, if the system grants them on request (Linux's
// transparent_hugepage setting "madvise"). Sequential reads are then a third faster: the
// processor's prefetching stops at the end of each page, and fewer pages miss the TLB.
#pragma once

#include <cstdint>

namespace pycomm::cpu {

// Call it before the memory is first touched. Never fails, because it is only advice.
void advise_huge_pages(void* data, std::int64_t bytes);

}  // namespace pycomm::cpu

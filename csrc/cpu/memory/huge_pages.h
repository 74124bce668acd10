// Pages of 2 MiB for large arrays, if the system grants them on request (Linux's
// transparent_hugepage setting "madvise"). Sequential reads are then a third faster: the
// processor's prefetching stops at the end of each page, and fewer pages miss the TLB. All of this is
// advice, and never fails.
#pragma once

#include <cstdint>

namespace pycomm::cpu {

// Call it before the memory is first touched.
void advise_huge_pages(void* data, std::int64_t bytes);

// Speeds up the first write to a large output that has just been allocated, whose pages do not
// exist yet: otherwise the system makes and clears them one at a time. The caller must write the
// whole output.
void prepare_output(void* data, std::int64_t bytes);

}  // namespace pycomm::cpu

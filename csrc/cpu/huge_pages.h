// Pages of 2 MiB for large arrays, where the system grants them to those who ask (Linux's
// transparent_hugepage setting "madvise"). Streams then read a third faster: the processor's
// prefetching stops at the end of each page, and fewer of them miss the TLB.
#pragma once

#include <cstdint>

namespace pycomm::cpu {

// Before memory is touched for the first time. Never fails: it is advice.
void advise_huge_pages(void* data, std::int64_t bytes);

}  // namespace pycomm::cpu

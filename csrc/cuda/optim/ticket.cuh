// Tickets count finished parts. The last block to arrive continues with the combined result.
#pragma once

#include <cstdint>

namespace pycomm::cuda {

// Counts `count` finished parts of `size`. Returns true to the caller that counts the last one: it
// sees what the others have written, and the ticket is zero again. If several threads did a part,
// one of them calls this after a barrier among them.
__device__ inline bool take_ticket(std::uint32_t* ticket, std::int64_t count, std::int64_t size) {
  __threadfence();
  if (atomicAdd(ticket, static_cast<std::uint32_t>(count)) + count != size) return false;
  __threadfence();
  atomicExch(ticket, 0u);  // not a store, which would race with the others' additions
  return true;
}

}  // namespace pycomm::cuda

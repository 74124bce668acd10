// Tickets: those who have done their part count, and the last one goes on with what all have done.
#pragma once

#include <cstdint>

namespace pycomm::cuda {

// Brings `count` of `size` parts. Returns true to the caller that brings the last one: it sees what
// the others have done, and the ticket is zero again. For one thread of those that have done a part,
// after a barrier among them.
__device__ inline bool take_ticket(std::uint32_t* ticket, std::int64_t count, std::int64_t size) {
  __threadfence();
  if (atomicAdd(ticket, static_cast<std::uint32_t>(count)) + count != size) return false;
  __threadfence();
  atomicExch(ticket, 0u);  // not a store, which would race with the others' additions
  return true;
}

}  // namespace pycomm::cuda

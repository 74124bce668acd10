// The algorithms of core/, run by this executor. What is declared here is compiled from core/ as it is,
// and once more for every mutant of it (checker/mutants.cmake).
#pragma once

#include "checker/comm.h"
#include "core/call.h"

namespace pycomm::checker {

// What a rank brings to an operation.
struct Buffers {
  Call call;
  std::byte* areas[2];  // top-k: for lists, in the window
  std::byte* scratch;   // for a packed stripe
};

// How many bytes an area has to have.
std::int64_t list_area_bytes(const Operation& operation, int ranks, int rank);

void run_on_node(Comm& comm, const Buffers& buffers);
// The halves of two-shot with stripes that take turns; in between, each rank has its own without gaps.
void run_stripes(Comm& comm, const Buffers& buffers);

}  // namespace pycomm::checker

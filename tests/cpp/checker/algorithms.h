// The algorithms of core/ on the checker's executor. This file's functions are compiled once from
// core/ and once more for each mutant of it (checker/mutants.cmake).
#pragma once

#include "checker/comm.h"
#include "core/call.h"

namespace pycomm::checker {

// A rank's buffers for an operation.
struct Buffers {
  Call call;
  std::byte* areas[2];  // top-k: areas for lists, in the window
  std::byte* scratch;   // for a packed stripe

  // Sharded step: every rank's tensors in the window, and what it measures.
  struct Shared {
    std::byte* input;
    std::byte* output;
    std::byte* sums;
  };
  std::vector<Shared> shared = {};
  bool measures = false, adapts = false;
};

// The required size of an area.
std::int64_t list_area_bytes(const Operation& operation, int ranks, int rank);

void run_on_node(Comm& comm, const Buffers& buffers);
// The halves of two-shot with interleaved stripes. In between, each rank has its own stripe without
// gaps.
void run_stripes(Comm& comm, const Buffers& buffers);

}  // namespace pycomm::checker

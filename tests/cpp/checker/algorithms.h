// The algorithms of core/, run by this executor. What is declared here is compiled from core/ as it is,
// and once more for every mutant of it (checker/mutants.cmake).
#pragma once

#include "checker/comm.h"
#include "checker/link.h"

namespace pycomm::checker {

// What a rank brings to an operation.
struct Buffers {
  std::byte* input;
  std::byte* output;
  std::byte* areas[2];  // top-k: for lists, in the window
  std::byte* scratch;   // for a packed stripe, and for parcels between nodes
};

// How many bytes these have to have.
std::int64_t list_area_bytes(const Operation& operation, int ranks, int rank);
std::int64_t parcel_buffer_bytes(const Operation& operation, int nodes);

// `fail_at`: the wait in which this rank fails, or Comm::kNeverFails.
void run_on_node(Comm& comm, const Operation& operation, const Buffers& buffers, int fail_at);
// The halves of two-shot with stripes that take turns; in between, each rank has its own without gaps.
void run_stripes(Comm& comm, const Operation& operation, const Buffers& buffers);
// All-reduce in three phases, as cpu/hosts.h has them. `link`: null if this rank carries no stripe.
void run_between_nodes(Comm& comm, Link* link, int stripes, const Operation& operation,
                       const Buffers& buffers);

}  // namespace pycomm::checker

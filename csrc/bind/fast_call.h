// The short way of the collectives: C functions that take the arguments as Python passes them, check
// them, and run the usual calls. What they do not know, they leave to the functions in Python, which
// check everything.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/group/group.h"

namespace pycomm::bind {

// Adds `short_way_first` to the module, which makes these functions. They run calls whose tensors are
// dense, contiguous tensors of supported types and of torch's own class that need no gradient, if the
// other arguments are in order and ask for nothing else. On CUDA they enqueue uncompressed calls of ranks
// on one node, from the second on: Python makes the kernels. A group of one needs none in place.
void bind_fast_call(pybind11::module_& m);

// The handle of a group; valid as long as the group exists.
pybind11::capsule handle_of(cpu::Group& group);

}  // namespace pycomm::bind

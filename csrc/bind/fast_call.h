// The short way of the most frequent call, an in-place all-reduce of an ordinary tensor: one C function
// that takes the arguments as Python passes them. What it does not know, it leaves to the function in
// Python, which checks everything.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/group.h"

namespace pycomm::bind {

// Adds `short_way_first` to the module, which makes that function. It runs calls itself if the tensor is
// a dense, contiguous CPU tensor of a supported type and of torch's own class that needs no gradient,
// and the other arguments are in order and ask for nothing but an operation on it.
void bind_fast_call(pybind11::module_& m);

// The handle of a group; valid as long as the group exists.
pybind11::capsule handle_of(cpu::Group& group);

}  // namespace pycomm::bind

// A fast path for the most frequent call, an in-place all-reduce of an ordinary tensor. It uses
// CPython's vectorcall and DLPack's C exchange, and takes half the time of pybind11 and an eighth
// of torch's dispatcher.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/group.h"

namespace pycomm::bind {

// Adds `all_reduce(handle, tensor, op, algorithm) -> bool` to the module. It returns False without
// doing anything if the tensor is not a dense, contiguous CPU tensor of a supported type that needs
// no gradient, or if this torch has no DLPack exchange. The caller then examines the tensor in
// Python.
void bind_fast_call(pybind11::module_& m);

// The handle of a group for all_reduce; valid as long as the group exists.
pybind11::capsule handle_of(cpu::Group& group);

}  // namespace pycomm::bind

// The short way of the most frequent call, an in-place all-reduce of an ordinary tensor: CPython's
// vector call and DLPack's C exchange, half the time that pybind11 takes and an eighth of torch's
// dispatcher.
#pragma once

#include <pybind11/pybind11.h>

#include "cpu/group.h"

namespace pycomm::bind {

// Adds `all_reduce(handle, tensor, op, algorithm) -> bool` to the module. False, with nothing done,
// where the tensor is not a dense, contiguous CPU tensor of a supported type that needs no
// gradient, or where this torch has no DLPack exchange; the caller then looks at the tensor in
// Python.
void bind_fast_call(pybind11::module_& m);

// What all_reduce takes for a group; valid as long as the group lives.
pybind11::capsule handle_of(cpu::Group& group);

}  // namespace pycomm::bind

// The attribute `tensor_reader` of the module (core/tensor_reader.h).
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::c10d {

void bind_tensor_reader(pybind11::module_& m);

}  // namespace pycomm::c10d

// What the parts of the binding share.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::bind {

// Sets the Python error for the C++ exception being handled.
void set_python_error();

// Lets Ctrl-C and other signals end a long wait.
void check_signals();

void bind_codec(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_transport(pybind11::module_& m);

}  // namespace pycomm::bind

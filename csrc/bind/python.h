// What the parts of the binding share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "common.h"

namespace pycomm::bind {

// Sets the Python error for the C++ exception being handled.
void set_python_error();

// Lets Ctrl-C and other signals end a long wait.
void check_signals();

// A tensor without memory that has come past Python's checks must not be read or written.
inline void check_memory(std::uintptr_t address, std::int64_t count) {
  PYCOMM_CHECK(address != 0 || count == 0, "tensor must have memory, got a null pointer");
}

void bind_codec(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_transport(pybind11::module_& m);

}  // namespace pycomm::bind

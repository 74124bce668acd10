// What the parts of the binding share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/details.h"
#include "core/types.h"

namespace pycomm::bind {

// Stands for a Python exception while C++ unwinds, which stays the raising thread's error
// indicator. Groups keep what they have failed with and throw it in several threads; a Python
// exception can only be raised once, and would hold the frames, and so the group, it came from.
class PythonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws a PythonError for the error indicator.
[[noreturn]] void throw_python_error();

// Sets the Python error for the C++ exception being handled.
void set_python_error() noexcept;

// Lets Ctrl-C and other signals end a long wait.
void check_signals();

// A tensor without memory that has come past Python's checks must not be read or written.
inline void check_memory(std::uintptr_t address, std::int64_t count) {
  PYCOMM_CHECK(address != 0 || count == 0, "tensor must have memory, got a null pointer");
}

// A tensor's shape; none counts as one dimension.
using Shape = std::optional<std::vector<std::int64_t>>;

inline Details make_details(const Shape& shape, const std::string& label) {
  Details details;
  if (shape) details.set_shape(shape->data(), static_cast<int>(shape->size()));
  details.set_label(label);
  return details;
}

void bind_codec(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_transport(pybind11::module_& m);

}  // namespace pycomm::bind

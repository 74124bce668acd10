// Declarations that the parts of the binding share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/message.h"
#include "core/record.h"

namespace pycomm::cpu {
class Group;
}

namespace pycomm::bind {

// Represents a Python exception while C++ unwinds. The exception itself stays in the raising
// thread's error indicator. Groups store the error that they have failed with and throw it in
// several threads. A Python exception can be raised only once, and it would keep alive the frames
// it came from, and so the group.
class PythonError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws a PythonError that represents the error indicator.
[[noreturn]] void throw_python_error();

// Sets the Python error for the C++ exception that is being handled.
void set_python_error() noexcept;

// Throws the Python error for the C++ exception that is being handled, for callers that know no other.
[[noreturn]] void throw_as_python();

// Runs Python's signal handlers, so that Ctrl-C and other signals can end a long wait.
void check_signals();

// Throws if a tensor has elements but no memory, in case Python's checks have missed that.
inline void check_memory(std::uintptr_t address, std::int64_t count) {
  PYCOMM_CHECK(address != 0 || count == 0, "tensor must have memory, got a null pointer");
}

// A tensor's shape; no shape means one dimension.
using Shape = std::optional<std::vector<std::int64_t>>;

inline Details make_details(const Shape& shape, const std::string& label) {
  Details details;
  if (shape) details.set_shape(shape->data(), static_cast<int>(shape->size()));
  details.set_label(label);
  return details;
}

// The same operation on `count` of the caller's elements.
inline Operation of(Operation kind, std::int64_t count) {
  kind.count = count * units_of(kind);
  return kind;
}

// A call without compression; `input` and `output` are addresses of `count` elements or blocks. An
// address is 0 if only the root has the tensor, or if the tensor is given as blocks.
inline Call make_call(const Operation& kind, std::int64_t count, std::uintptr_t input,
                      std::uintptr_t output, const Shape& shape, const std::string& label) {
  if (kind.collective <= Collective::barrier) {
    check_memory(input, count);
    check_memory(output, count);
  }
  return {of(kind, count),
          reinterpret_cast<const void*>(input),
          reinterpret_cast<void*>(output),
          {},
          make_details(shape, label)};
}

// A group's state, made of dicts and lists.
pybind11::dict to_python(const GroupState& group);

// A secret from its bytes.
Secret secret_of(const pybind11::bytes& bytes);

using GroupClass = pybind11::class_<cpu::Group, std::shared_ptr<cpu::Group>>;

void bind_backend_table(pybind11::module_& m);
void bind_call(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_crossing(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_dense_tensor(pybind11::module_& m);
void bind_mem_pool(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_sharded(pybind11::module_& m);
void bind_step_description(pybind11::module_& m);
void bind_p2p(pybind11::module_& m, GroupClass& group);
void bind_record(pybind11::module_& m, GroupClass& group);
void bind_transport(pybind11::module_& m);

}  // namespace pycomm::bind

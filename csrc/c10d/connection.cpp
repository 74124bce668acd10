#include "c10d/connection.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>

#include "c10d/arguments.h"
#include "c10d/completer.h"

namespace py = pybind11;

namespace pycomm::c10d {
namespace {

const BackendTable* table = nullptr;
thread_local int calling_back = 0;

// An exception that can be raised any number of times, unlike pybind11's. With the GIL.
std::exception_ptr persisted(PyObject* type, const py::object& value) {
  PyErr_SetObject(type, value.ptr());
  python_error raised;
  raised.persist();
  return std::make_exception_ptr(raised);
}

std::exception_ptr persisted(const char* name, const py::object& message) {
  return persisted(py::module_::import("pycomm.errors").attr(name).ptr(), message);
}

[[noreturn]] void throw_new(const char* name, const std::string& message) {
  std::exception_ptr exception;
  with_gil([&] {
    const py::error_scope raising;
    exception = persisted(name, py::str(message));
  });
  std::rethrow_exception(exception);
}

}  // namespace

const BackendTable& native() { return *table; }

void find_native() {
  const py::object capsule = py::module_::import("pycomm._C").attr("backend_table");
  table = static_cast<const BackendTable*>(PyCapsule_GetPointer(capsule.ptr(), kBackendTableName));
  if (table == nullptr) throw py::error_already_set();
  if (table->layout != kBackendTableLayout) {
    throw py::import_error(
        "pycomm's torch.distributed backend and pycomm._C come from different "
        "sources: build both");
  }
}

std::exception_ptr as_exception(Error error) {
  std::exception_ptr exception;
  with_gil([&] {
    const py::error_scope raising;  // this thread may be raising another exception
    const auto value = py::reinterpret_steal<py::object>(error);
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(error));
    if (type == PyExc_ValueError) {
      exception = persisted("ArgumentError", py::str(value));
    } else if (type == PyExc_TypeError) {
      exception = persisted("ArgumentTypeError", py::str(value));
    } else {
      exception = persisted(type, value);
    }
  });
  return exception;
}

void throw_argument_error(const std::string& message) { throw_new("ArgumentError", message); }

void throw_argument_type_error(const std::string& message) {
  throw_new("ArgumentTypeError", message);
}

CallingBack::CallingBack() { ++calling_back; }
CallingBack::~CallingBack() { --calling_back; }

void drop(py::object object) {
  PyObject* const pointer = object.release().ptr();
  if (pointer == nullptr) return;
  const auto release = [pointer] { with_gil([pointer] { Py_DECREF(pointer); }); };
  calling_back > 0 ? complete_elsewhere(release) : release();
}

Connection::~Connection() {
  drop(std::move(connect_));
  drop(std::move(cuda_side_));
  drop(std::move(group_));
}

void* Connection::connect() {
  const LockWithoutGil lock(connecting_);
  if (handle_ != nullptr) return handle_;
  const py::gil_scoped_acquire gil;
  group_ = connect_();
  const py::object capsule = group_.attr("_handle");
  void* const handle = PyCapsule_GetPointer(capsule.ptr(), kGroupCapsule);
  if (handle == nullptr) throw py::error_already_set();
  spans_nodes_ = py::len(group_.attr("nodes")) > 1;
  handle_.store(handle, std::memory_order_release);
  return handle;
}

// Other devices than the first one are for Python to refuse.
void* Connection::cuda_side(c10::Device device) {
  group();
  const LockWithoutGil lock(connecting_);
  if (device_ == device) return cuda_handle_;
  const py::gil_scoped_acquire gil;
  cuda_side_ = group_.attr("_cuda_side")(device).attr("_core");
  const py::object capsule = cuda_side_.attr("handle");
  cuda_handle_ = PyCapsule_GetPointer(capsule.ptr(), kCudaCapsule);
  if (cuda_handle_ == nullptr) throw py::error_already_set();
  device_ = device;
  return cuda_handle_;
}

// The priority is high if other ranks wait for the stream's kernels.
c10::Stream Connection::stream(std::optional<c10::Stream>& of, c10::Device device,
                               bool high_priority) {
  const LockWithoutGil lock(making_stream_);
  if (!of || of->device() != device) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    of = guard.getStreamFromGlobalPool(device, high_priority);
  }
  return *of;
}

}  // namespace pycomm::c10d

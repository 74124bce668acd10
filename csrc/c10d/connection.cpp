#include "c10d/connection.h"

#include <torch/csrc/Exceptions.h>

#include "c10d/completer.h"

namespace py = pybind11;

namespace pycomm::c10d {
namespace {

const BackendTable* table = nullptr;
thread_local int calling_back = 0;

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
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
    python_error raised;  // unlike pybind's exception, it can be raised any number of times
    raised.persist();
    exception = std::make_exception_ptr(raised);
  });
  return exception;
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
  drop(std::move(group_));
}

// The lock is always taken without the GIL, so that no thread holds one and waits for the other.
void* Connection::connect() {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check() != 0) no_gil.emplace();
  const std::lock_guard lock(connecting_);
  if (handle_ != nullptr) return handle_;
  const py::gil_scoped_acquire gil;
  group_ = connect_();
  const py::object capsule = group_.attr("_handle");
  void* const handle = PyCapsule_GetPointer(capsule.ptr(), "pycomm.group");
  if (handle == nullptr) throw py::error_already_set();
  handle_.store(handle, std::memory_order_release);
  return handle;
}

}  // namespace pycomm::c10d

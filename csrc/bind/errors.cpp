// Translates C++ exceptions to Python: the collectives' own to the classes of pycomm/errors.py, all
// others as in pybind11.
#include <pybind11/pybind11.h>

#include <system_error>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/errors.h"
#include "cpu/group/group.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

const char* class_of(Reason reason) {
  switch (reason) {
    case Reason::peer_died:
    case Reason::returned:
      return "PeerDied";
    case Reason::timeout:
      return "Timeout";
    case Reason::mismatch:
      return "Mismatch";
    case Reason::aborted:
      return "Aborted";
    case Reason::malformed:
      return "ProtocolError";
    case Reason::none:
      break;
  }
  return "CollectiveError";
}

void set_collective_error(const CollectiveError& error) {
  const py::object type = py::module_::import("pycomm.errors").attr(class_of(error.reason));
  const py::object value =
      type(error.what(), py::arg("rank") = error.rank, py::arg("pid") = error.pid,
           py::arg("operation") = error.operation, py::arg("sequence") = error.sequence,
           py::arg("completed") = error.completed,
           py::arg("state") = error.group ? py::object(to_python(*error.group)) : py::none());
  PyErr_SetObject(type.ptr(), value.ptr());
}

void translate_current() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const PythonError& error) {
    if (PyErr_Occurred() != nullptr) return;  // already set by this thread
    py::set_error(py::module_::import("pycomm.errors").attr("GroupUnusable"),
                  (std::string("group has failed: ") + error.what()).c_str());
  } catch (const CollectiveError& error) {
    set_collective_error(error);
  } catch (const cpu::GroupUnusable& error) {
    py::set_error(py::module_::import("pycomm.errors").attr("GroupUnusable"), error.what());
  } catch (const std::bad_alloc& error) {
    py::set_error(PyExc_MemoryError, error.what());
  } catch (const std::invalid_argument& error) {
    py::set_error(PyExc_ValueError, error.what());
  } catch (const std::system_error& error) {
    // With the number, so that Python chooses the subclass.
    PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
  } catch (const std::exception& error) {
    py::set_error(PyExc_RuntimeError, error.what());
  }
}

}  // namespace

void throw_python_error() {
  py::error_already_set error;
  const std::string text = error.what();  // first line: the exception; then: the traceback
  error.restore();
  throw PythonError(text.substr(0, text.find('\n')));
}

void set_python_error() noexcept {
  try {
    translate_current();
  } catch (py::error_already_set& error) {  // a signal arrived while Python made the exception
    error.restore();
  }
}

void throw_as_python() {
  const WithGil gil;
  set_python_error();
  throw py::error_already_set();
}

void check_signals() {
  const WithGil gil;
  if (PyErr_Occurred() != nullptr) return;  // another error is already set
  if (PyErr_CheckSignals() != 0) throw_python_error();
}

}  // namespace pycomm::bind

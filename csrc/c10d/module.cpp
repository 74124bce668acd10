// pycomm._c10d: the backend as a Python class, which torch.distributed registers.
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/backend.h"
#include "c10d/completer.h"

namespace py = pybind11;

namespace {

// torch's C++ classes differ between minor versions.
void check_version() {
  const std::string built =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  const auto found = py::module_::import("torch").attr("__version__").cast<py::str>();
  if (std::string(found).starts_with(built)) return;
  throw py::import_error("pycomm's torch.distributed backend was built with torch " +
                         std::string(TORCH_VERSION) + ", and this is torch " + std::string(found) +
                         ": install pycomm again, with pip install --force-reinstall "
                         "--no-build-isolation");
}

}  // namespace

PYBIND11_MODULE(_c10d, m) {
  using pycomm::c10d::Backend;
  check_version();
  pycomm::c10d::find_native();
  // torch translates these in its own functions, but not in those that pybind11 makes.
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer != nullptr) std::rethrow_exception(pointer);
    } catch (python_error& error) {
      error.restore();
    }
  });
  py::module_::import("torch.distributed");  // has the base class
  py::class_<Backend, ::c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init<int, int, std::chrono::milliseconds, py::object>(), py::arg("rank"),
           py::arg("size"), py::arg("timeout"), py::arg("ranks"));
  m.def("stop_completing", &pycomm::c10d::stop_completing,
        py::call_guard<py::gil_scoped_release>());
}

// pycomm._c10d: the backend as a Python class, which torch.distributed registers.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/backend.h"

namespace py = pybind11;

PYBIND11_MODULE(_c10d, m) {
  using pycomm::c10d::Backend;
  pycomm::c10d::find_native();
  py::module_::import("torch.distributed");  // has the base class
  py::class_<Backend, ::c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init<int, int, std::chrono::milliseconds, py::object>(), py::arg("rank"),
           py::arg("size"), py::arg("timeout"), py::arg("ranks"));
}

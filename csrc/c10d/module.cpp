// The backend as a Python class, which torch.distributed registers. The module's name tells the
// minor version of torch that it is compiled for, because torch's C++ classes differ between them.
#include <pybind11/chrono.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/arguments.h"
#include "c10d/backend.h"
#include "c10d/completer.h"
#include "c10d/tensor_reader.h"

namespace py = pybind11;

namespace {

// Gives a storage, and so all tensors that share it, the memory of another one. The taker's old
// memory is freed, and the giver is left without any.
void take_memory(const at::Tensor& taker, const at::Tensor& giver) {
  const c10::Storage &taking = taker.storage(), &giving = giver.storage();
  pycomm::c10d::check_argument(giving.nbytes() >= taking.nbytes(), "giver must have ",
                               taking.nbytes(), " bytes of memory, got ", giving.nbytes());
  taking.set_data_ptr(giving.set_data_ptr({nullptr, taker.device()}));
  giving.set_nbytes(0);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using pycomm::Algorithm, pycomm::c10d::Backend, pycomm::c10d::BackendOptions;
  pycomm::c10d::find_native();
  // torch translates these in its own functions, but not in those that pybind11 makes.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer != nullptr) std::rethrow_exception(pointer);
    } catch (python_error& error) {
      error.restore();
    }
  });
  py::module_::import("torch.distributed");  // has the base class
  py::class_<Backend, ::c10d::Backend, c10::intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init([](int rank, int size, std::chrono::milliseconds timeout,
                       const std::string& algorithm, py::object ranks) {
             return c10::make_intrusive<Backend>(rank, size, timeout,
                                                 pycomm::parse<Algorithm>(algorithm, "algorithm"),
                                                 std::move(ranks));
           }),
           py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("algorithm"),
           py::arg("ranks"))
      // new_group() calls this on the ranks that are not in the new group.
      .def("perform_nocolor_split", [](Backend&, const c10::Device&) {})
      .def_property_readonly("options", &Backend::getBackendOptions);
  py::class_<BackendOptions, ::c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>>(
      m, "Options")
      .def(py::init([](const std::string& algorithm) {
             auto options = c10::make_intrusive<BackendOptions>("pycomm");
             options->algorithm = pycomm::parse<Algorithm>(algorithm, "algorithm");
             return options;
           }),
           py::arg("algorithm"))
      .def_property_readonly(
          "algorithm",
          [](const BackendOptions& options) { return pycomm::name_of(options.algorithm); })
      .def("__deepcopy__", [](const BackendOptions& options, const py::dict&) {
        return c10::make_intrusive<BackendOptions>(options);
      });
  pycomm::c10d::bind_tensor_reader(m);
  m.def("take_memory", &take_memory, py::arg("taker"), py::arg("giver"));
  m.def("stop_completing", &pycomm::c10d::stop_completing,
        py::call_guard<py::gil_scoped_release>());
}

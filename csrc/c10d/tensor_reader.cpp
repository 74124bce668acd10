#include "core/tensor_reader.h"

#include <ATen/DLConvertor.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "c10d/request.h"
#include "c10d/tensor_reader.h"

namespace pycomm::c10d {
namespace {

bool view(PyObject* object, void* view) {
  // With a profiler, the call goes through Python and becomes a range (pycomm/_runtime/ranges.py).
  if (at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.requires_grad() || tensor.is_neg()) return false;
  try {
    at::toDLPackNonOwning(tensor, static_cast<DLTensor*>(view));
    return true;
  } catch (...) {
    return false;
  }
}

bool increment_version(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  try {
    count_write(tensor);
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

constexpr TensorReader kReader{view, increment_version};

}  // namespace

void bind_tensor_reader(pybind11::module_& m) {
  m.attr("tensor_reader") = pybind11::capsule(&kReader, kTensorReaderName);
}

}  // namespace pycomm::c10d

#include "core/tensor_reader.h"

#include <ATen/DLConvertor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "c10d/request.h"
#include "c10d/tensor_reader.h"

namespace pycomm::c10d {
namespace {

// With a profiler, the call goes through Python and becomes a range (pycomm/_runtime/ranges.py).
bool watched() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value() ||
         c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Python);
}

bool view(PyObject* object, void* view) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  // Nearly all tensors that autograd knows nothing about have no such record.
  const bool known = tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  if (known && (tensor.requires_grad() || tensor._fw_grad(0).defined())) return false;
  if (tensor.is_neg()) return false;
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

constexpr TensorReader kReader{watched, view, increment_version};

}  // namespace

void bind_tensor_reader(pybind11::module_& m) {
  m.attr("tensor_reader") = pybind11::capsule(&kReader, kTensorReaderName);
}

}  // namespace pycomm::c10d

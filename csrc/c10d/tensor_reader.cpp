#include "core/tensor_reader.h"

#include <ATen/DLConvertor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "c10d/request.h"
#include "c10d/stream_order.h"
#include "c10d/tensor_reader.h"

namespace pycomm::c10d {
namespace {

// With a profiler, the call goes through Python and becomes a range (pycomm/_runtime/ranges.py).
bool watched() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value() ||
         included.has(c10::DispatchKey::Python) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

void* view(PyObject* object, void* view) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  // Nearly all tensors that autograd knows nothing about have no such record.
  const bool known = tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr;
  if (known && (tensor.requires_grad() || tensor._fw_grad(0).defined())) return nullptr;
  if (tensor.is_neg()) return nullptr;
  try {
    at::toDLPackNonOwning(tensor, static_cast<DLTensor*>(view));
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    c10::raw::intrusive_ptr::incref(storage);
    return storage;
  } catch (...) {
    return nullptr;
  }
}

void release(void* memory) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(memory));
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

// As Tensor.record_stream() without torch's dispatcher.
bool record_stream(PyObject* object, std::uintptr_t& stream) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  try {
    const c10::impl::VirtualGuardImpl device(tensor.device().type());
    const c10::Stream current = device.getStream(tensor.device());
    device.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
    stream = reinterpret_cast<std::uintptr_t>(current.native_handle());
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

constexpr TensorReader kReader{watched, view, release, increment_version, record_stream};

}  // namespace

void bind_tensor_reader(pybind11::module_& m) {
  m.attr("tensor_reader") = pybind11::capsule(&kReader, kTensorReaderName);
}

}  // namespace pycomm::c10d

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

// Hundreds of tensors are described in a step, so this reads torch's fields, without calls to torch.
bool describe_tensor(const at::Tensor& tensor, TensorDescription& description) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const c10::Device device = impl->device();
  const c10::Storage& storage = impl->unsafe_storage();
  if (impl->layout() != c10::kStrided || !storage || !(device.is_cpu() || device.is_cuda())) {
    return false;
  }
  // Its own memory, also if the tensor has shared a copy so far.
  void* const memory = storage.unsafeGetStorageImpl()->mutable_data();
  // A wrapper, whose elements are in other tensors.
  if (memory == nullptr && impl->key_set().has(c10::DispatchKey::Python)) return false;
  const c10::ScalarType type = c10::typeMetaToScalarType(impl->dtype());
  const c10::IntArrayRef shape = impl->sizes();
  const auto size = static_cast<std::int64_t>(c10::elementSize(type));
  description.data = static_cast<std::byte*>(memory) + impl->storage_offset() * size;
  if (memory == nullptr || impl->numel() == 0) description.data = nullptr;
  description.shape = shape.data();
  description.strides = impl->strides().data();
  description.version = impl->is_inference() ? -1 : impl->version_counter().current_version();
  description.dims = static_cast<std::int32_t>(shape.size());
  description.device = device.is_cpu() ? std::int16_t{-1} : std::int16_t{device.index()};
  description.type = static_cast<std::int8_t>(type);
  description.negated = impl->is_neg();
  return true;
}

bool describe(PyObject* object, TensorDescription& description) {
  try {
    return describe_tensor(THPVariable_Unpack(object), description);
  } catch (...) {
    return false;
  }
}

bool describe_grad(PyObject* object, TensorDescription& description, void*& memory) {
  try {
    const at::Tensor& grad = THPVariable_Unpack(object).grad();
    if (!grad.defined()) return true;
    if (!describe_tensor(grad, description)) return false;
    c10::StorageImpl* const storage = grad.storage().unsafeGetStorageImpl();
    c10::raw::intrusive_ptr::incref(storage);
    memory = storage;
    return true;
  } catch (...) {
    return false;
  }
}

constexpr TensorReader kReader{watched,       view,     release,      increment_version,
                               record_stream, describe, describe_grad};

}  // namespace

void bind_tensor_reader(pybind11::module_& m) {
  m.attr("tensor_reader") = pybind11::capsule(&kReader, kTensorReaderName);
}

}  // namespace pycomm::c10d

#include "bind/dense_tensor.h"

#include <ATen/dlpack.h>

#include "bind/dtypes.h"
#include "bind/python.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

static_assert(kInt == kDLInt && kUInt == kDLUInt && kFloat == kDLFloat && kBFloat == kDLBfloat &&
              kBool == kDLBool);

struct Torch {
  PyTypeObject* tensor_type = nullptr;
  PyTypeObject* parameter_type = nullptr;
  const DLPackExchangeAPI* exchange = nullptr;  // null if this torch has none
  PyObject* requires_grad = nullptr;
  PyObject* grad = nullptr;
  PyObject* version = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* detach = nullptr;
  PyObject* increment_version = nullptr;
  PyObject* count_modes = nullptr;
  PyObject* backward_id = nullptr;
  PyObject* profiler = nullptr;    // a module
  PyObject* forward_ad = nullptr;  // another
};

const Torch& torch() {
  // Leaked, because it must outlive the interpreter's other objects.
  static const Torch* const found = [] {
    auto* torch = new Torch;
    const auto import = [](const char* name) { return py::module_::import(name); };
    const py::object type = import("torch").attr("Tensor");
    torch->tensor_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
    const py::object parameter = import("torch.nn").attr("Parameter");
    torch->parameter_type = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
    torch->requires_grad = PyUnicode_InternFromString("requires_grad");
    torch->grad = PyUnicode_InternFromString("grad");
    torch->version = PyUnicode_InternFromString("_version");
    torch->is_neg = PyUnicode_InternFromString("is_neg");
    torch->detach = PyUnicode_InternFromString("detach");
    torch->increment_version =
        py::object(import("torch._C").attr("_increment_version")).release().ptr();
    torch->count_modes =
        py::object(import("torch._C").attr("_len_torch_dispatch_stack")).release().ptr();
    torch->backward_id =
        py::object(import("torch._C").attr("_current_graph_task_id")).release().ptr();
    torch->profiler = import("torch.autograd.profiler").release().ptr();
    torch->forward_ad = import("torch.autograd.forward_ad").release().ptr();
    const py::object capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
    if (!capsule.is_none()) {
      const auto* api = static_cast<const DLPackExchangeAPI*>(
          PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (api == nullptr) PyErr_Clear();
      if (api != nullptr && api->header.version.major == DLPACK_MAJOR_VERSION)
        torch->exchange = api;
    }
    return torch;
  }();
  return *found;
}

// True if `answer` is False. Takes ownership of `answer`.
bool is_false(PyObject* answer) {
  if (answer == nullptr) PyErr_Clear();
  const bool plain = answer == Py_False;
  Py_XDECREF(answer);
  return plain;
}

// True if `answer` is this number. Takes ownership of `answer`.
bool is_number(PyObject* answer, long number) {
  const bool same = answer != nullptr && PyLong_AsLong(answer) == number;
  PyErr_Clear();
  Py_XDECREF(answer);
  return same;
}

// The functions of TensorReader for any torch.
bool watched_by_python() {
  const Torch& known = torch();
  return !is_false(PyObject_GetAttrString(known.profiler, "_is_profiler_enabled")) ||
         !is_number(PyObject_CallNoArgs(known.count_modes), 0);
}

// Views a detached tensor, which keeps the memory alive.
void* view_by_dlpack(PyObject* object, void* view) {
  const Torch& known = torch();
  if (known.exchange == nullptr || known.exchange->dltensor_from_py_object_no_sync == nullptr ||
      !is_false(PyObject_GetAttr(object, known.requires_grad)) ||
      !is_number(PyObject_GetAttrString(known.forward_ad, "_current_level"), -1) ||
      !is_false(PyObject_CallMethodNoArgs(object, known.is_neg))) {
    return nullptr;
  }
  PyObject* const same = PyObject_CallMethodNoArgs(object, known.detach);
  if (same != nullptr &&
      known.exchange->dltensor_from_py_object_no_sync(same, static_cast<DLTensor*>(view)) == 0) {
    return same;
  }
  PyErr_Clear();
  Py_XDECREF(same);
  return nullptr;
}

void release_by_python(void* memory) { Py_DECREF(static_cast<PyObject*>(memory)); }

bool increment_version_by_python(PyObject* tensor) {
  const py::object tensors = py::reinterpret_steal<py::object>(PyTuple_Pack(1, tensor));
  if (!tensors) return false;
  PyObject* const none = PyObject_CallOneArg(torch().increment_version, tensors.ptr());
  Py_XDECREF(none);
  return none != nullptr;
}

// The number of a version; -1 without one.
std::int64_t version_of(PyObject* tensor) {
  PyObject* const version = PyObject_GetAttr(tensor, torch().version);
  const std::int64_t number = version != nullptr ? PyLong_AsLongLong(version) : -1;
  PyErr_Clear();
  Py_XDECREF(version);
  return number;
}

bool describe_by_dlpack(PyObject* object, TensorDescription& description) {
  const Torch& known = torch();
  const PyTypeObject* const type = Py_TYPE(object);
  // Others may run any code when they are asked.
  if ((type != known.tensor_type && type != known.parameter_type) || known.exchange == nullptr ||
      known.exchange->dltensor_from_py_object_no_sync == nullptr) {
    return false;
  }
  DLTensor tensor;
  if (known.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::optional<TorchDType> dtype =
      torch_dtype_of(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
  const bool on_cuda = tensor.device.device_type == kDLCUDA;
  if ((tensor.device.device_type != kDLCPU && !on_cuda) || !dtype ||
      (tensor.strides == nullptr && tensor.ndim != 0)) {
    return false;
  }
  description.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  description.shape = tensor.shape;
  description.strides = tensor.strides;
  description.version = version_of(object);
  description.dims = tensor.ndim;
  description.device = static_cast<std::int16_t>(on_cuda ? tensor.device.device_id : kOnHost);
  description.type = static_cast<std::int8_t>(dtype->scalar_type);
  description.negated = !is_false(PyObject_CallMethodNoArgs(object, known.is_neg));
  return true;
}

bool describe_grad_by_dlpack(PyObject* tensor, TensorDescription& description, void*& memory) {
  PyObject* const grad = PyObject_GetAttr(tensor, torch().grad);
  PyErr_Clear();
  const bool none = grad == Py_None;
  const bool described = grad != nullptr && !none && describe_by_dlpack(grad, description);
  if (described) {
    memory = grad;
  } else {
    Py_XDECREF(grad);
  }
  return none || described;
}

constexpr TensorReader kAnyTorch{watched_by_python,           view_by_dlpack, release_by_python,
                                 increment_version_by_python, nullptr,        describe_by_dlpack,
                                 describe_grad_by_dlpack};
TensorReader reader = kAnyTorch;

void set_tensor_reader(const py::object& capsule) {
  if (capsule.is_none()) {
    reader = kAnyTorch;
    return;
  }
  const void* const compiled = PyCapsule_GetPointer(capsule.ptr(), kTensorReaderName);
  if (compiled == nullptr) throw py::error_already_set();
  reader = *static_cast<const TensorReader*>(compiled);
}

}  // namespace

void bind_dense_tensor(py::module_& m) { m.def("set_tensor_reader", &set_tensor_reader); }

bool calls_are_watched() { return reader.watched(); }

bool in_backward() { return !is_number(PyObject_CallNoArgs(torch().backward_id), -1); }

Keeper::~Keeper() {
  if (memory_ != nullptr) reader.release(memory_);
}

py::object Keeper::into_object() && {
  return py::capsule(std::exchange(memory_, nullptr), [](void* memory) { reader.release(memory); });
}

bool view_tensor(PyObject* object, DenseTensor& view) {
  DLTensor tensor;
  if (Py_TYPE(object) != torch().tensor_type) return false;
  view.keeper = Keeper(reader.view(object, &tensor));
  if (!view.keeper) return false;
  const std::optional<TorchDType> dtype =
      torch_dtype_of(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
  const bool on_cuda = tensor.device.device_type == kDLCUDA;
  if ((tensor.device.device_type != kDLCPU && !on_cuda) || !dtype) return false;

  view.device = on_cuda ? tensor.device.device_id : kOnHost;
  view.element = dtype->element;
  view.dims = tensor.ndim;
  view.shape = tensor.shape;
  view.count = 1;
  bool contiguous = true;
  for (int d = tensor.ndim - 1; d >= 0; --d) {
    if (tensor.strides != nullptr && tensor.shape[d] != 1) {
      contiguous = contiguous && tensor.strides[d] == view.count;
    }
    view.count *= tensor.shape[d];
  }
  if (!contiguous && view.count != 0) return false;
  if (tensor.data == nullptr && view.count != 0) return false;
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  return true;
}

bool view_dense_tensor(PyObject* object, DenseTensor& view) {
  return view_tensor(object, view) && view.device == kOnHost;
}

bool increment_version(PyObject* tensor) { return reader.increment_version(tensor); }

bool describe(PyObject* object, TensorDescription& description) {
  return PyObject_TypeCheck(object, torch().tensor_type) && reader.describe(object, description);
}

bool describe_grad(PyObject* tensor, TensorDescription& description, Keeper& memory) {
  void* kept = nullptr;
  const bool described = PyObject_TypeCheck(tensor, torch().tensor_type) &&
                         reader.describe_grad(tensor, description, kept);
  memory = Keeper(kept);
  return described;
}

bool records_streams() { return reader.record_stream != nullptr; }

bool record_stream(PyObject* tensor, std::uintptr_t& stream) {
  return reader.record_stream(tensor, stream);
}

}  // namespace pycomm::bind

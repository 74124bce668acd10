#include "bind/fast_call.h"

#include <ATen/dlpack.h>

#include "bind/dtypes.h"
#include "bind/gil.h"
#include "bind/python.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

static_assert(kInt == kDLInt && kUInt == kDLUInt && kFloat == kDLFloat && kBFloat == kDLBfloat &&
              kBool == kDLBool);

constexpr const char* kHandleName = "pycomm.group";

struct TensorView {
  void* data;
  Element element;
  std::int64_t count;
  int dims;
  const std::int64_t* shape;
};

struct Torch {
  PyTypeObject* tensor_type = nullptr;
  const DLPackExchangeAPI* exchange = nullptr;  // null if this torch has none
  PyObject* requires_grad = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* increment_version = nullptr;
};

const Torch& torch() {
  // Leaked, because it must outlive the interpreter's other objects.
  static const Torch* const found = [] {
    auto* torch = new Torch;
    const py::object type = py::module_::import("torch").attr("Tensor");
    torch->tensor_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
    torch->requires_grad = PyUnicode_InternFromString("requires_grad");
    torch->is_neg = PyUnicode_InternFromString("is_neg");
    const py::object increment = py::module_::import("torch._C").attr("_increment_version");
    torch->increment_version = increment.inc_ref().ptr();
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

bool view_plain_tensor(PyObject* object, TensorView& view) {
  const Torch& known = torch();
  if (known.exchange == nullptr || Py_TYPE(object) != known.tensor_type) return false;
  DLTensor tensor;
  if (known.exchange->dltensor_from_py_object_no_sync == nullptr ||
      known.exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::optional<Element> element =
      element_of(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
  if (tensor.device.device_type != kDLCPU || !element) return false;

  view.element = *element;
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

  return is_false(PyObject_GetAttr(object, known.requires_grad)) &&
         is_false(PyObject_CallMethodNoArgs(object, known.is_neg));
}

// Tells autograd, which may have saved the tensor, that its content changes.
bool increment_version(PyObject* tensor) {
  const py::object tensors = py::reinterpret_steal<py::object>(PyTuple_Pack(1, tensor));
  if (!tensors) return false;
  PyObject* const none = PyObject_CallOneArg(torch().increment_version, tensors.ptr());
  Py_XDECREF(none);
  return none != nullptr;
}

PyObject* all_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "all_reduce takes handle, tensor, op, algorithm");
    return nullptr;
  }
  auto* group = static_cast<cpu::Group*>(PyCapsule_GetPointer(arguments[0], kHandleName));
  const long op = PyLong_AsLong(arguments[2]), algorithm = PyLong_AsLong(arguments[3]);
  if (group == nullptr || PyErr_Occurred() != nullptr) return nullptr;
  TensorView view;
  if (!view_plain_tensor(arguments[1], view)) Py_RETURN_FALSE;
  if (!increment_version(arguments[1])) return nullptr;
  try {
    const WithoutGil no_gil;
    const Operation operation{Collective::all_reduce,
                              static_cast<Algorithm>(algorithm),
                              {},
                              static_cast<ReduceOp>(op),
                              0,
                              view.count};
    Call call{carried(operation, view.element), view.data, view.data};
    call.details.set_shape(view.shape, view.dims);
    group->run(call, check_signals);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {
    {"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
     METH_FASTCALL, "all_reduce(handle, tensor, op, algorithm) -> bool"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_fast_call(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

py::capsule handle_of(cpu::Group& group) { return py::capsule(&group, kHandleName); }

}  // namespace pycomm::bind

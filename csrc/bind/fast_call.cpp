#include "bind/fast_call.h"

#include <ATen/dlpack.h>

#include <algorithm>
#include <iterator>

#include "bind/dtypes.h"
#include "bind/gil.h"
#include "bind/python.h"
#include "core/algorithms/table.h"
#include "core/tensor_reader.h"

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

// The two functions of TensorReader for any torch.
bool view_by_dlpack(PyObject* object, void* view) {
  const Torch& known = torch();
  if (known.exchange == nullptr || known.exchange->dltensor_from_py_object_no_sync == nullptr ||
      known.exchange->dltensor_from_py_object_no_sync(object, static_cast<DLTensor*>(view)) != 0) {
    PyErr_Clear();
    return false;
  }
  return is_false(PyObject_GetAttr(object, known.requires_grad)) &&
         is_false(PyObject_CallMethodNoArgs(object, known.is_neg));
}

bool increment_version(PyObject* tensor) {
  const py::object tensors = py::reinterpret_steal<py::object>(PyTuple_Pack(1, tensor));
  if (!tensors) return false;
  PyObject* const none = PyObject_CallOneArg(torch().increment_version, tensors.ptr());
  Py_XDECREF(none);
  return none != nullptr;
}

TensorReader reader{view_by_dlpack, increment_version};

bool view_plain_tensor(PyObject* object, TensorView& view) {
  DLTensor tensor;
  if (Py_TYPE(object) != torch().tensor_type || !reader.view(object, &tensor)) return false;
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
  return true;
}

// What the call reads of pycomm: set once, by short_way_first(), and never freed.
struct Ours {
  PyObject* whole_way;  // the function in Python
  PyObject* group_type;
  PyObject* module;  // the variables of pycomm._init, with the default group
  PyObject* ops;     // numbers of names and of torch's constants
  PyObject* algorithms;
};
Ours ours;

// The parameters of all_reduce, of which the first two may be passed by position.
enum Parameter {
  kTensor,
  kOp,
  kOut,
  kAlgorithm,
  kDeterministic,
  kGroup,
  kAsync,
  kTag,
  kParameters
};
constexpr const char* kParameterNames[] = {"tensor",        "op",    "out",      "algorithm",
                                           "deterministic", "group", "async_op", "tag"};
constexpr Py_ssize_t kPositional = 2;
PyObject* parameter_names[kParameters];
PyObject *default_name, *handle_name;

using Arguments = PyObject* [kParameters];

// Sorts arguments by parameter; null if not given. False unless they fit. Names in source code are
// interned, and so are these.
bool sort_arguments(PyObject* const* values, Py_ssize_t positional, PyObject* names,
                    Arguments& sorted) {
  if (positional > kPositional) return false;
  std::copy_n(values, positional, sorted);
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto* const found =
        std::find(parameter_names, std::end(parameter_names), PyTuple_GET_ITEM(names, i));
    if (found == std::end(parameter_names)) return false;
    PyObject*& place = sorted[found - parameter_names];
    if (place != nullptr) return false;
    place = values[positional + i];
  }
  return true;
}

bool is_none(PyObject* argument) { return argument == nullptr || argument == Py_None; }

// The number of a choice, or -1. The first choices are the defaults.
static_assert(ReduceOp{} == ReduceOp::sum && Algorithm{} == Algorithm::automatic);
int choice(PyObject* argument, PyObject* numbers) {
  if (argument == nullptr) return 0;
  PyObject* const number = PyDict_GetItemWithError(numbers, argument);
  if (number == nullptr) PyErr_Clear();  // not hashable
  return number != nullptr ? static_cast<int>(PyLong_AsLong(number)) : -1;
}

// The group's engine, or null if the group is to be examined in Python.
cpu::Group* engine_of(PyObject* group) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(group)) != ours.group_type) return nullptr;
  const auto handle = py::reinterpret_steal<py::object>(PyObject_GetAttr(group, handle_name));
  void* const engine =
      handle && !handle.is_none() ? PyCapsule_GetPointer(handle.ptr(), kHandleName) : nullptr;
  if (engine == nullptr) PyErr_Clear();
  return static_cast<cpu::Group*>(engine);
}

PyObject* all_reduce(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
  const auto in_python = [&] {
    return PyObject_Vectorcall(ours.whole_way, values, positional, names);
  };
  Arguments given{};
  if (!sort_arguments(values, positional, names, given)) return in_python();
  if (given[kTensor] == nullptr || !is_none(given[kOut]) || !is_none(given[kTag]) ||
      (given[kAsync] != nullptr && given[kAsync] != Py_False)) {
    return in_python();
  }
  const int op = choice(given[kOp], ours.ops);
  const int algorithm = choice(given[kAlgorithm], ours.algorithms);
  if (op < 0 || algorithm < 0) return in_python();
  const bool any_order = given[kDeterministic] == nullptr || given[kDeterministic] == Py_False;
  if (!any_order && Algorithms::partial_sums(static_cast<Algorithm>(algorithm))) return in_python();

  // Held during the call, because another thread may replace the default group.
  const auto group = py::reinterpret_borrow<py::object>(
      is_none(given[kGroup]) ? PyDict_GetItemWithError(ours.module, default_name) : given[kGroup]);
  cpu::Group* const engine = group ? engine_of(group.ptr()) : nullptr;
  TensorView view;
  if (engine == nullptr || !view_plain_tensor(given[kTensor], view)) return in_python();
  if (!reader.increment_version(given[kTensor])) return nullptr;
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
    engine->run(call, check_signals);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  return Py_NewRef(given[kTensor]);
}

}  // namespace

void bind_fast_call(py::module_& m) {
  m.def("short_way_first", [](py::object whole_way, py::object group_type, py::dict module,
                              py::dict ops, py::dict algorithms, const std::string& doc,
                              py::object torchs) {
    static PyMethodDef method;
    static std::string text;
    text = doc;
    method = {"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
              METH_FASTCALL | METH_KEYWORDS, text.c_str()};
    for (int i = 0; i < kParameters; ++i) {
      parameter_names[i] = PyUnicode_InternFromString(kParameterNames[i]);
    }
    default_name = PyUnicode_InternFromString("_default");
    handle_name = PyUnicode_InternFromString("_short_way");
    if (!torchs.is_none()) {
      const void* const compiled = PyCapsule_GetPointer(torchs.ptr(), kTensorReaderName);
      if (compiled == nullptr) throw py::error_already_set();
      reader = *static_cast<const TensorReader*>(compiled);
    }
    const py::object name = whole_way.attr("__module__");
    ours = {whole_way.release().ptr(), group_type.release().ptr(), module.release().ptr(),
            ops.release().ptr(), algorithms.release().ptr()};
    return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, nullptr, name.ptr()));
  });
}

py::capsule handle_of(cpu::Group& group) { return py::capsule(&group, kHandleName); }

}  // namespace pycomm::bind

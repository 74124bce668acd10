#include "bind/fast_call.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "bind/dense_tensor.h"
#include "bind/gil.h"
#include "bind/python.h"
#include "core/algorithms/table.h"
#include "core/backend_table.h"
#include "cuda/group.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

// What a parameter is for.
enum class Argument : std::uint8_t {
  input,
  output,
  residual,
  compression,
  op,
  algorithm,
  deterministic,
  root,
  step,
  offset,
  group,
  async_op,
  none,  // only Python knows other values than None
  off    // or other values than False
};

struct Parameter {
  const char* name = nullptr;
  Argument argument = Argument::none;
};

constexpr Parameter kGroup{"group", Argument::group}, kAsync{"async_op", Argument::async_op},
    kTag{"tag", Argument::none}, kOp{"op", Argument::op}, kStrict{"strict", Argument::off},
    kCompression{"compression", Argument::compression}, kResidual{"residual", Argument::residual},
    kStep{"step", Argument::step}, kOffset{"offset", Argument::offset},
    kPreserve{"preserve", Argument::off};

constexpr int kMostParameters = 13;

// A function in Python. Its output is its input if it has none, or if none is given.
struct Function {
  const char* name;
  Collective collective;
  Algorithm algorithm;  // unless one is given
  ReduceOp op;          // likewise
  bool compresses;
  int positional;  // how many parameters may be passed by position
  std::array<Parameter, kMostParameters> parameters;
};

constexpr Function kFunctions[] = {
    {"all_reduce",
     Collective::all_reduce,
     Algorithm::automatic,
     ReduceOp::sum,
     false,
     2,
     {{{"tensor", Argument::input},
       kOp,
       {"out", Argument::output},
       {"algorithm", Argument::algorithm},
       {"deterministic", Argument::deterministic},
       kGroup,
       kAsync,
       kTag,
       kPreserve}}},
    {"reduce",
     Collective::reduce,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     3,
     {{{"tensor", Argument::input}, {"dst", Argument::root}, kOp, kGroup, kAsync, kTag}}},
    {"reduce_scatter",
     Collective::reduce_scatter,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     3,
     {{{"output", Argument::output}, {"input", Argument::input}, kOp, kGroup, kAsync, kTag}}},
    {"all_gather",
     Collective::all_gather,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     2,
     {{{"output", Argument::output}, {"input", Argument::input}, kGroup, kAsync, kTag}}},
    {"broadcast",
     Collective::broadcast,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     2,
     {{{"tensor", Argument::input}, {"src", Argument::root}, kGroup, kAsync, kTag, kPreserve}}},
    {"barrier",
     Collective::barrier,
     Algorithm::one_shot,
     ReduceOp::sum,
     false,
     0,
     {{kGroup, kAsync, kTag}}},
    {"gather",
     Collective::gather,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     3,
     {{{"tensor", Argument::input},
       {"gather_list", Argument::output},
       {"dst", Argument::root},
       kGroup,
       kAsync,
       kTag}}},
    {"scatter",
     Collective::scatter,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     3,
     {{{"tensor", Argument::output},
       {"scatter_list", Argument::input},
       {"src", Argument::root},
       kGroup,
       kAsync,
       kTag}}},
    {"all_to_all",
     Collective::all_to_all,
     Algorithm::two_shot,
     ReduceOp::sum,
     false,
     4,
     {{{"output", Argument::output},
       {"input", Argument::input},
       {"output_split_sizes", Argument::none},
       {"input_split_sizes", Argument::none},
       kGroup,
       kAsync,
       kTag}}},
    {"compressed_all_reduce",
     Collective::all_reduce,
     Algorithm::automatic,
     ReduceOp::avg,
     true,
     2,
     {{{"tensor", Argument::input},
       kCompression,
       kResidual,
       {"velocity", Argument::none},
       kOp,
       {"out", Argument::output},
       {"algorithm", Argument::algorithm},
       kStep,
       kOffset,
       kStrict,
       kGroup,
       kAsync,
       kTag}}},
    {"compressed_reduce_scatter",
     Collective::reduce_scatter,
     Algorithm::two_shot,
     ReduceOp::avg,
     true,
     3,
     {{{"output", Argument::output},
       {"input", Argument::input},
       kCompression,
       kResidual,
       kOp,
       kStep,
       kOffset,
       kStrict,
       kGroup,
       kAsync,
       kTag}}},
};

// What calls read of pycomm: set once, by set_up_short_way(), and never freed.
struct Ours {
  PyObject* group_type;
  PyObject* module;  // the variables of pycomm._init, with the default group
  PyObject* ops;     // numbers of names and of torch's constants
  PyObject* algorithms;
  PyObject* work_type;
};
Ours ours;
PyObject* own_compressions;  // a tuple of classes: set once, with the compressed operations

// Interned names, as those in source code are.
struct Names {
  PyObject* default_group;
  PyObject* handle;
  PyObject* cuda;
  PyObject* shares_device;
  PyObject* dtype;
  PyObject* codec;
  PyObject* momentum;
  PyObject* seed;
};
Names names;

// A function that Python has: set once, by short_way_first(), and never freed.
struct Bound {
  PyMethodDef method{};
  std::string text;
  PyObject* whole_way = nullptr;                        // the function in Python
  std::array<PyObject*, kMostParameters> parameters{};  // their names, interned
};
Bound bound[std::size(kFunctions)];

// The values of the arguments; null if not given.
class Arguments {
 public:
  PyObject*& operator[](Argument argument) { return values_[static_cast<std::size_t>(argument)]; }
  PyObject* operator[](Argument argument) const {
    return values_[static_cast<std::size_t>(argument)];
  }

 private:
  PyObject* values_[static_cast<std::size_t>(Argument::off) + 1] = {};
};

bool is_none(PyObject* argument) { return argument == nullptr || argument == Py_None; }

// Sorts arguments. False unless they fit the parameters.
inline bool sort_arguments(const Function& function, const Bound& known, PyObject* const* values,
                           Py_ssize_t positional, PyObject* keywords, Arguments& sorted) {
  if (positional > function.positional) return false;
  unsigned taken = 0;
  const auto take = [&](std::size_t parameter, PyObject* value) {
    const unsigned bit = 1u << parameter;
    if ((taken & bit) != 0) return false;
    taken |= bit;
    const Argument argument = function.parameters[parameter].argument;
    if (argument == Argument::none) return value == Py_None;
    if (argument == Argument::off) return value == Py_False;
    sorted[argument] = value;
    return true;
  };
  for (Py_ssize_t i = 0; i < positional; ++i) {
    if (!take(static_cast<std::size_t>(i), values[i])) return false;
  }
  const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto* const found =
        std::find(known.parameters.begin(), known.parameters.end(), PyTuple_GET_ITEM(keywords, i));
    if (found == known.parameters.end()) return false;
    const auto parameter = static_cast<std::size_t>(found - known.parameters.begin());
    if (!take(parameter, values[positional + i])) return false;
  }
  return true;
}

// The number of a choice, or -1.
int choice(PyObject* argument, PyObject* numbers, int standard) {
  if (argument == nullptr) return standard;
  PyObject* const number = PyDict_GetItemWithError(numbers, argument);
  if (number == nullptr) PyErr_Clear();  // not hashable
  return number != nullptr ? static_cast<int>(PyLong_AsLong(number)) : -1;
}

// A number from 0 to `end` - 1; -1 for others, and for what is not simply an int.
std::int64_t whole_number(PyObject* argument, std::int64_t end) {
  if (argument == nullptr) return 0;
  if (!PyLong_CheckExact(argument)) return -1;
  int overflow = 0;
  const std::int64_t number = PyLong_AsLongLongAndOverflow(argument, &overflow);
  return overflow == 0 && number >= 0 && number < end ? number : -1;
}

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object, name);
  if (value == nullptr) throw_python_error();
  return py::reinterpret_steal<py::object>(value);
}

// The group's engine, or null if the group is to be examined in Python.
cpu::Group* engine_of(PyObject* group) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(group)) != ours.group_type) return nullptr;
  const auto handle = py::reinterpret_steal<py::object>(PyObject_GetAttr(group, names.handle));
  void* const engine =
      handle && !handle.is_none() ? PyCapsule_GetPointer(handle.ptr(), kGroupCapsule) : nullptr;
  if (engine == nullptr) PyErr_Clear();
  return static_cast<cpu::Group*>(engine);
}

// The group's kernels on a device, held; nothing if the call is to be examined in Python, which also
// makes them.
struct Kernels {
  py::object holder;
  cuda::Group* group = nullptr;
};
Kernels kernels_of(PyObject* group, int device) {
  Kernels found;
  const auto side = py::reinterpret_steal<py::object>(PyObject_GetAttr(group, names.cuda));
  if (side && !side.is_none()) {
    found.holder = py::reinterpret_steal<py::object>(PyObject_GetAttr(side.ptr(), names.handle));
  }
  if (!found.holder) {
    PyErr_Clear();
  } else if (!found.holder.is_none() && records_streams()) {
    auto& kernels = found.holder.cast<cuda::Group&>();
    const py::object shares = attribute(side.ptr(), names.shares_device);
    const bool refused = shares.ptr() != Py_False && in_backward();  // with an error of Python's
    if (kernels.device() == device && !refused) found.group = &kernels;
  }
  return found;
}

// Arguments that are names or numbers.
struct Choices {
  Algorithm algorithm;
  ReduceOp op;
  std::int32_t root;
};

// False: Python examines them.
inline bool read_choices(const Function& function, const Arguments& given, const cpu::Group& engine,
                         Choices& choices) {
  const int op = choice(given[Argument::op], ours.ops, static_cast<int>(function.op));
  const int algorithm =
      choice(given[Argument::algorithm], ours.algorithms, static_cast<int>(function.algorithm));
  const std::int64_t root = whole_number(given[Argument::root], engine.size());
  if (op < 0 || algorithm < 0 || root < 0) return false;
  choices = {static_cast<Algorithm>(algorithm), static_cast<ReduceOp>(op),
             static_cast<std::int32_t>(root)};
  PyObject* const deterministic = given[Argument::deterministic];
  if (deterministic == nullptr || deterministic == Py_False) return true;
  choices.algorithm = engine.in_rank_order(choices.algorithm);
  return !Algorithms::partial_sums(choices.algorithm);
}

// The two tensors of a call. A rank that needs only one passes it as both.
struct Tensors {
  PyObject* input;
  PyObject* output;
  PyObject* returned = Py_None;
  bool reads = true;
  bool writes = true;
  DenseTensor from{};
  DenseTensor other{};  // the output, unless it is the input
  DenseTensor residual{};

  const DenseTensor& to() const { return output == input ? from : other; }
};

// False unless the tensors that this rank needs are given, and no others.
inline bool choose_tensors(Collective collective, bool on_root, Tensors& tensors) {
  switch (collective) {
    case Collective::all_reduce:
    case Collective::broadcast:
    case Collective::reduce:
      if (is_none(tensors.output)) tensors.output = tensors.input;
      tensors.returned = tensors.output;
      tensors.writes = collective != Collective::reduce || on_root;
      break;
    case Collective::gather:
      if (is_none(tensors.output) == on_root) return false;
      tensors.writes = on_root;
      if (on_root) tensors.returned = tensors.output;
      if (!on_root) tensors.output = tensors.input;
      break;
    case Collective::scatter:
      if (is_none(tensors.input) == on_root) return false;
      tensors.reads = on_root;
      if (!on_root) tensors.input = tensors.output;
      tensors.returned = tensors.output;
      break;
    default:
      tensors.returned = tensors.output;
  }
  return tensors.input != nullptr && tensors.output != nullptr;
}

inline bool overlap(const DenseTensor& a, const DenseTensor& b) {
  const auto begin = [](const DenseTensor& x) { return static_cast<std::byte*>(x.data); };
  const auto end = [&](const DenseTensor& x) { return begin(x) + x.count * size_of(x.element); };
  return a.count != 0 && b.count != 0 && begin(a) < end(b) && begin(b) < end(a);
}

bool same_shape(const DenseTensor& a, const DenseTensor& b) {
  return a.dims == b.dims && std::equal(a.shape, a.shape + a.dims, b.shape);
}

// Reads the tensors. False unless they go together.
inline bool read_tensors(Tensors& tensors) {
  DenseTensor &from = tensors.from, &to = tensors.other;
  if (!view_tensor(tensors.input, from)) return false;
  if (tensors.output == tensors.input) return true;
  if (!view_tensor(tensors.output, to) || to.element != from.element || to.device != from.device) {
    return false;
  }
  const bool in_place = from.data == to.data && from.count == to.count;
  return in_place || !overlap(from, to);
}

// Sets the number of elements in the tensor, or in a block. False unless the sizes fit each other.
inline bool read_count(Collective collective, int ranks, const Tensors& tensors,
                       std::int64_t& count) {
  const DenseTensor &from = tensors.from, &to = tensors.to();
  switch (collective) {
    case Collective::reduce_scatter:
    case Collective::scatter:
      count = to.count;
      return !tensors.reads || from.count == count * ranks;
    case Collective::all_gather:
    case Collective::gather:
      count = from.count;
      return !tensors.writes || to.count == count * ranks;
    case Collective::all_to_all:
      count = from.count / ranks;
      return from.count == to.count && from.count % ranks == 0;
    default:
      count = from.count;
      return tensors.input == tensors.output || same_shape(from, to);
  }
}

// The shape that ranks compare: of the tensor, or of a block.
inline void set_shape(Collective collective, const Tensors& tensors, std::int64_t count,
                      Details& details) {
  switch (collective) {
    case Collective::barrier:
      return;
    case Collective::reduce_scatter:
    case Collective::scatter:
      return details.set_shape(tensors.to().shape, tensors.to().dims);
    case Collective::all_to_all:
      return details.set_shape(&count, 1);
    default:
      return details.set_shape(tensors.from.shape, tensors.from.dims);
  }
}

// False unless the residual is fp32, like the input, and apart from the other tensors.
bool read_residual(PyObject* residual, Tensors& tensors, Feedback& feedback) {
  if (is_none(residual)) return true;
  DenseTensor& view = tensors.residual;
  if (!view_dense_tensor(residual, view) || view.element != Element::f32 ||
      !same_shape(view, tensors.from) || overlap(view, tensors.from) ||
      overlap(view, tensors.to())) {
    return false;
  }
  if (view.count != 0) feedback.residual = static_cast<float*>(view.data);
  return true;
}

// What the compression's method codec() returns; nothing if it refuses the tensor.
std::optional<Codec> codec_of(PyObject* compression, const Tensors& tensors, std::int64_t step) {
  const auto count = py::int_(tensors.from.count), steps = py::int_(step);
  const py::object dtype = attribute(tensors.input, names.dtype);
  PyObject* const arguments[] = {compression, count.ptr(), dtype.ptr(), steps.ptr()};
  const auto codec = py::reinterpret_steal<py::object>(
      PyObject_VectorcallMethod(names.codec, arguments, std::size(arguments), nullptr));
  if (codec) return codec.cast<Codec>();
  if (!PyErr_ExceptionMatches(PyExc_ValueError)) throw_python_error();  // such as an interrupt
  PyErr_Clear();
  return {};
}

bool is_own_compression(PyObject* compression) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(compression));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own_compressions); ++i) {
    if (PyTuple_GET_ITEM(own_compressions, i) == type) return true;
  }
  return false;
}

// Adds a compressed call's own arguments. False: Python examines them.
bool read_compression(const Arguments& given, Tensors& tensors, Call& call) {
  PyObject* const compression = given[Argument::compression];
  Operation& operation = call.operation;
  const Element element = tensors.from.element;
  const bool by_default = operation.algorithm == Algorithm::automatic;
  const std::int64_t step = whole_number(given[Argument::step], std::int64_t{1} << 32);
  const std::int64_t offset = whole_number(given[Argument::offset], kSmallestBlock << 32);
  if (compression == nullptr || !is_own_compression(compression) || step < 0 || offset < 0 ||
      (element != Element::f32 && element != Element::f16 && element != Element::bf16) ||
      (operation.op != ReduceOp::sum && operation.op != ReduceOp::avg) ||
      (!by_default && !Algorithms::coded(operation.algorithm)) ||
      !read_residual(given[Argument::residual], tensors, call.feedback)) {
    return false;
  }
  const py::object seed = attribute(compression, names.seed);
  const py::object momentum = attribute(compression, names.momentum);
  if (!PyLong_CheckExact(seed.ptr()) || PyObject_IsTrue(momentum.ptr()) != 0) return false;
  const std::optional<Codec> codec = codec_of(compression, tensors, step);
  if (!codec || offset % block_of(*codec) != 0) return false;
  const bool in_order = by_default || operation.algorithm == Algorithm::two_shot;
  if (codec->kind == CodecKind::topk &&
      (operation.collective != Collective::all_reduce || !in_order)) {
    return false;
  }
  operation.codec = *codec;
  operation.codec.feedback = call.feedback.residual != nullptr ? 1 : 0;
  operation.offset = static_cast<std::uint32_t>(offset / kSmallestBlock);
  call.feedback.seed = PyLong_AsUnsignedLongLong(seed.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();  // it is negative or too large
    return false;
  }
  call.feedback.step = static_cast<std::uint32_t>(step);
  return true;
}

inline bool count_writes(const Arguments& given, const Tensors& tensors) {
  PyObject* const residual = given[Argument::residual];
  return (!tensors.writes || tensors.output == nullptr || increment_version(tensors.output)) &&
         (is_none(residual) || increment_version(residual));
}

// Hands a call to the group's worker; returns a pycomm.Work.
PyObject* submit(cpu::Group& engine, const Call& call, Tensors& tensors) {
  py::list kept;
  for (DenseTensor* const tensor : {&tensors.from, &tensors.other, &tensors.residual}) {
    if (tensor->keeper) kept.append(std::move(tensor->keeper).into_object());
  }
  py::tuple keepers(kept);
  const auto work = [&] {
    const WithoutGil no_gil;
    return engine.submit({call});
  }();
  const py::object handle = py::cast(work);
  PyObject* const made =
      PyObject_CallFunctionObjArgs(ours.work_type, handle.ptr(), keepers.ptr(), nullptr);
  if (made == nullptr) keepers.release();  // never freed, because the worker uses the memory
  return made;
}

// Enqueues a call on the current stream, whose handle it sets. False with an error if that fails.
bool enqueue(const Kernels& kernels, const Call& call, const Tensors& tensors,
             std::uintptr_t& stream) {
  if (!record_stream(tensors.input, stream)) return false;
  if (tensors.output != tensors.input && !record_stream(tensors.output, stream)) return false;
  const WithoutGil no_gil;
  kernels.group->run(call, stream);
  return true;
}

// The result of a call, or null with an error. Nothing: Python examines the call.
inline std::optional<PyObject*> run(const Function& function, const Arguments& given) {
  PyObject* const async_op = given[Argument::async_op];
  const bool waits = async_op == nullptr || async_op == Py_False;
  if (!(waits || async_op == Py_True) || calls_are_watched()) return {};
  // Held during the call, because another thread may replace the default group.
  const auto group = py::reinterpret_borrow<py::object>(
      is_none(given[Argument::group]) ? PyDict_GetItemWithError(ours.module, names.default_group)
                                      : given[Argument::group]);
  cpu::Group* const engine = group ? engine_of(group.ptr()) : nullptr;
  if (engine == nullptr) return {};

  const Collective collective = function.collective;
  const int ranks = engine->size();
  Choices choices;
  if (!read_choices(function, given, *engine, choices)) return {};
  Tensors tensors{given[Argument::input], given[Argument::output]};
  std::int64_t count = 0;
  if (collective != Collective::barrier &&
      (!choose_tensors(collective, engine->rank() == choices.root, tensors) ||
       !read_tensors(tensors) || !read_count(collective, ranks, tensors, count))) {
    return {};
  }
  const bool on_host = tensors.from.device == kOnHost;
  // On a device, a group of one runs no kernel: the result is there already.
  const bool is_done = !on_host && ranks == 1 && tensors.output == tensors.input;
  Kernels kernels;
  if (!on_host && function.compresses) return {};
  if (!on_host && !is_done) {
    kernels = kernels_of(group.ptr(), tensors.from.device);
    if (kernels.group == nullptr) return {};
  }
  Call call;
  Operation& operation = call.operation;
  operation.collective = collective;
  operation.algorithm = choices.algorithm;
  operation.op = choices.op;
  operation.root = choices.root;
  operation.count = count;
  call.input = tensors.from.data;
  call.output = tensors.to().data;
  set_shape(collective, tensors, count, call.details);
  if (function.compresses && !read_compression(given, tensors, call)) return {};
  if (!count_writes(given, tensors)) return nullptr;
  carry(operation, tensors.from.element);
  if (on_host && !waits) return submit(*engine, call, tensors);
  std::uintptr_t stream = 0;
  if (on_host) {
    const WithoutGil no_gil;
    engine->run(call, check_signals);
  } else if (is_done) {
    engine->check_usable();
  } else if (!enqueue(kernels, call, tensors, stream)) {
    return nullptr;
  }
  if (waits) return Py_NewRef(tensors.returned);
  if (is_done) return PyObject_CallOneArg(ours.work_type, Py_None);
  // What a device runs is complete in the order of this stream, and of streams that wait for it.
  return PyObject_CallFunction(ours.work_type, "O()O(iK)", Py_None, Py_None, tensors.from.device,
                               static_cast<unsigned long long>(stream));
}

PyObject* call(const Function& function, const Bound& known, PyObject* const* values,
               Py_ssize_t positional, PyObject* keywords) {
  Arguments given;
  try {
    if (sort_arguments(function, known, values, positional, keywords, given)) {
      if (const std::optional<PyObject*> result = run(function, given)) return *result;
    }
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  return PyObject_Vectorcall(known.whole_way, values, positional, keywords);
}

template <std::size_t i>
PyObject* entry(PyObject*, PyObject* const* values, Py_ssize_t positional, PyObject* keywords) {
  return call(kFunctions[i], bound[i], values, positional, keywords);
}

template <std::size_t... i>
constexpr std::array<_PyCFunctionFastWithKeywords, sizeof...(i)> entries_of(
    std::index_sequence<i...>) {
  return {entry<i>...};
}
constexpr auto kEntries = entries_of(std::make_index_sequence<std::size(kFunctions)>());

py::object short_way_first(const py::object& whole_way, const std::string& doc) {
  const auto name = whole_way.attr("__name__").cast<std::string>();
  std::size_t i = 0;
  while (i < std::size(kFunctions) && kFunctions[i].name != name) ++i;
  PYCOMM_CHECK(i < std::size(kFunctions), "no function is called " + name);
  Bound& known = bound[i];
  known.text = doc;
  known.whole_way = whole_way.inc_ref().ptr();
  for (std::size_t p = 0; p < kFunctions[i].parameters.size(); ++p) {
    const char* const parameter = kFunctions[i].parameters[p].name;
    if (parameter != nullptr) known.parameters[p] = PyUnicode_InternFromString(parameter);
  }
  known.method = {kFunctions[i].name,
                  reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kEntries[i])),
                  METH_FASTCALL | METH_KEYWORDS, known.text.c_str()};
  const py::object module = whole_way.attr("__module__");
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&known.method, nullptr, module.ptr()));
}

}  // namespace

void bind_fast_call(py::module_& m) {
  m.def("set_up_short_way", [](py::object group_type, py::dict module, py::dict ops,
                               py::dict algorithms, py::object work_type) {
    const auto interned = [](const char* text) { return PyUnicode_InternFromString(text); };
    names = {interned("_default"),      interned("_short_way"), interned("_cuda"),
             interned("shares_device"), interned("dtype"),      interned("codec"),
             interned("momentum"),      interned("seed")};
    ours = {group_type.release().ptr(), module.release().ptr(), ops.release().ptr(),
            algorithms.release().ptr(), work_type.release().ptr()};
  });
  m.def("set_compressions_of_short_way",
        [](py::tuple compressions) { own_compressions = compressions.release().ptr(); });
  m.def("short_way_first", &short_way_first);
}

py::capsule handle_of(cpu::Group& group) { return py::capsule(&group, kGroupCapsule); }

}  // namespace pycomm::bind

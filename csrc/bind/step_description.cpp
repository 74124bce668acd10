// What an optimizer remembers of its last step, to use it again: the tensors of each row of its tables,
// as words that change if the row must be made anew. A step compares all rows in one call. Only a
// gradient may have another address, which is written into the table.
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "bind/dense_tensor.h"
#include "bind/optim.h"
#include "bind/python.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

template <class T>
std::uint64_t word_of(T* address) {
  return reinterpret_cast<std::uintptr_t>(address);
}

std::int64_t count_of(const TensorDescription& tensor) {
  std::int64_t count = 1;
  for (int d = 0; d < tensor.dims; ++d) count *= tensor.shape[d];
  return count;
}

// Calls `take` with words that tell how a tensor's elements lie, until it returns false.
template <class Take>
bool visit_layout(const TensorDescription& tensor, Take&& take) {
  const auto byte = [](auto value) { return std::uint64_t{static_cast<std::uint8_t>(value)}; };
  const auto device = std::uint64_t{static_cast<std::uint16_t>(tensor.device)};
  bool same = take(std::uint64_t{static_cast<std::uint32_t>(tensor.dims)} << 32 | device << 16 |
                   byte(tensor.type) << 8 | byte(tensor.negated));
  for (int d = 0; same && d < tensor.dims; ++d) {
    same = take(static_cast<std::uint64_t>(tensor.shape[d])) &&
           take(static_cast<std::uint64_t>(tensor.strides[d]));
  }
  return same;
}

// The same for a parameter's state: its names, its tensors and their addresses.
template <class Take>
bool visit_state(PyObject* state, Take&& take) {
  Py_ssize_t at = 0;
  PyObject *name = nullptr, *value = nullptr;
  while (PyDict_Next(state, &at, &name, &value) != 0) {
    const auto held = py::reinterpret_borrow<py::object>(value);
    TensorDescription tensor;
    const bool described = describe(value, tensor);
    if (!take(word_of(name)) || !take(described ? word_of(tensor.data) : word_of(value)) ||
        (described && !visit_layout(tensor, take))) {
      return false;
    }
  }
  return true;
}

// A parameter, or its local elements, with its gradient and its state.
class RowDescription {
 public:
  RowDescription(const py::handle& param, const py::handle& grad, const py::handle& state) {
    TensorDescription own, its_grad;
    const auto note = [&](std::uint64_t word) {
      words_.push_back(word);
      return true;
    };
    if (!describe(param.ptr(), own) || own.version < 0 || !describe(grad.ptr(), its_grad) ||
        !PyDict_Check(state.ptr())) {
      return;
    }
    for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(state)) {
      held_.push_back(py::reinterpret_borrow<py::object>(name));
      TensorDescription tensor;
      if (!describe(value.ptr(), tensor))
        held_.push_back(py::reinterpret_borrow<py::object>(value));
    }
    known_ = visit(param.ptr(), own, its_grad, state.ptr(), note);
  }

  // True if the row is still right, but for the gradient's address.
  bool fits(const py::handle& param, const py::handle& grad, const py::handle& state) const {
    TensorDescription own, its_grad;
    return describe(param.ptr(), own) && describe(grad.ptr(), its_grad) &&
           fits(param.ptr(), own, its_grad, state.ptr());
  }

  bool fits(PyObject* param, const TensorDescription& own, const TensorDescription& grad,
            PyObject* state) const {
    if (!known_ || !PyDict_Check(state) || (grad.data == nullptr && count_of(grad) != 0))
      return false;
    auto next = words_.begin();
    const auto compare = [&](std::uint64_t word) {
      return next != words_.end() && *next++ == word;
    };
    return visit(param, own, grad, state, compare) && next == words_.end();
  }

 private:
  template <class Take>
  static bool visit(PyObject* param, const TensorDescription& own, const TensorDescription& grad,
                    PyObject* state, Take&& take) {
    return take(word_of(Py_TYPE(param))) && take(word_of(own.data)) && visit_layout(own, take) &&
           visit_layout(grad, take) && visit_state(state, take);
  }

  bool known_ = false;
  std::vector<std::uint64_t> words_;
  std::vector<py::object> held_;  // objects whose addresses stand for them
};

// All parameters of an optimizer, after a step.
class StepDescription {
 public:
  // `params`: of all groups, in order. `rows`: their rows, or None for a parameter without a gradient.
  // `tables`: arrays of segments, which together are the rows. `versioned`: for each row, whether a
  // counted write to the parameter changes it.
  StepDescription(const py::list& params, const py::list& rows, const py::list& versioned,
                  const py::list& tables, const py::handle& states) {
    std::vector<Segment*> segments;
    for (const py::handle& table : tables) {
      tables_.push_back(py::reinterpret_borrow<py::buffer>(table).request(true));
      const std::span<const Segment> found = rows_of<Segment>(tables_.back());
      for (const Segment& segment : found) segments.push_back(const_cast<Segment*>(&segment));
    }
    if (PyDict_Check(states.ptr())) read_states(states.ptr());
    std::size_t row = 0;
    for (std::size_t p = 0; p < params.size(); ++p) {
      Parameter& param = params_.emplace_back();
      param.tensor = params[p];
      if (py::object(rows[p]).is_none()) continue;
      PYCOMM_CHECK(row < segments.size(), "tables must have a segment for each row");
      param.row = py::cast<std::shared_ptr<RowDescription>>(py::object(rows[p]));
      param.segment = segments[row++];
      while (param.place < states_.size() && states_[param.place].param != param.tensor.ptr()) {
        ++param.place;
      }
      param.versioned = py::cast<bool>(py::object(versioned[p]));
      note_version(param);
    }
    PYCOMM_CHECK(row == segments.size(), "tables must have only the rows' segments");
  }

  // True if the rows of the tables are right for a step. Until end() or let_go(), the gradients' memory
  // is kept.
  bool begin(const py::list& groups, const py::handle& states) {
    let_go();  // of a step that has failed
    const bool same = PyDict_Check(states.ptr()) && compare(groups, states.ptr());
    if (!same) {
      let_go();
      return false;
    }
    bool moved = false;
    for (const auto& [segment, address] : grads_) {
      moved = moved || segment->grad != address;
      segment->grad = address;
    }
    edition_ += moved ? 1 : 0;
    return true;
  }

  void let_go() {
    grads_.clear();
    kept_.clear();
  }

  // After the step: the parameters have been written to.
  void end() {
    let_go();
    for (Parameter& param : params_) {
      if (!param.row) continue;
      if (!increment_version(param.tensor.ptr())) throw py::error_already_set();
      note_version(param);
    }
  }

  // Parameters whose versions matter, with their versions and addresses after the last step.
  py::list marks() const {
    py::list found;
    for (const Parameter& param : params_) {
      if (!param.row || !param.versioned) continue;
      found.append(py::make_tuple(param.tensor,
                                  py::make_tuple(param.version, word_of(param.segment->param))));
    }
    return found;
  }

  // A number that changes with the tables.
  std::int64_t edition() const { return edition_; }

  // For Python's garbage collector: a parameter may lead back to its optimizer.
  int visit_params(visitproc visit, void* arg) const {
    for (const Parameter& param : params_) Py_VISIT(param.tensor.ptr());
    return 0;
  }
  void clear_params() { std::exchange(params_, {}); }

 private:
  struct Parameter {
    py::object tensor;
    std::shared_ptr<RowDescription> row;  // null if it has no gradient
    Segment* segment = nullptr;
    std::size_t place = 0;  // of its state among all states
    bool versioned = false;
    std::int64_t version = 0;
  };
  struct State {
    PyObject* param;
    PyObject* state;
  };

  static void note_version(Parameter& param) {
    TensorDescription own;
    if (describe(param.tensor.ptr(), own)) param.version = own.version;
  }

  void read_states(PyObject* states) {
    states_.clear();
    Py_ssize_t at = 0;
    State found{};
    while (PyDict_Next(states, &at, &found.param, &found.state) != 0) states_.push_back(found);
  }

  bool compare(const py::list& groups, PyObject* states) {
    read_states(states);
    auto param = params_.begin();
    for (const py::handle& group : groups) {
      if (!PyList_Check(group.ptr())) return false;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(group.ptr()); ++i) {
        if (param == params_.end() || !compare(*param++, PyList_GET_ITEM(group.ptr(), i))) {
          return false;
        }
      }
    }
    return param == params_.end();
  }

  bool compare(const Parameter& known, PyObject* param) {
    TensorDescription own, grad;
    Keeper memory;
    if (param != known.tensor.ptr() || !describe_grad(param, grad, memory) ||
        static_cast<bool>(memory) != static_cast<bool>(known.row)) {
      return false;
    }
    if (!known.row) return true;
    if (known.place >= states_.size() || states_[known.place].param != param ||
        !describe(param, own) || (known.versioned && own.version != known.version) ||
        !known.row->fits(param, own, grad, states_[known.place].state)) {
      return false;
    }
    grads_.emplace_back(known.segment, grad.data);
    kept_.push_back(std::move(memory));
    return true;
  }

  std::vector<py::buffer_info> tables_;
  std::vector<Parameter> params_;
  std::vector<State> states_;  // of the call that runs
  std::vector<std::pair<Segment*, const void*>> grads_;
  std::vector<Keeper> kept_;
  std::int64_t edition_ = 0;
};

// Null while it is being made.
StepDescription* made_in(PyObject* object) {
  const auto place = reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder();
  return place.holder_constructed() ? place.value_ptr<StepDescription>() : nullptr;
}

void let_collect(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    const StepDescription* const made = made_in(object);
    return made != nullptr ? made->visit_params(visit, arg) : 0;
  };
  type.tp_clear = [](PyObject* object) {
    if (StepDescription* const made = made_in(object)) made->clear_params();
    return 0;
  };
}

}  // namespace

void bind_step_description(py::module_& m) {
  py::class_<RowDescription, std::shared_ptr<RowDescription>>(m, "RowDescription")
      .def(py::init<py::handle, py::handle, py::handle>(), py::arg("param"), py::arg("grad"),
           py::arg("state"))
      .def("fits",
           py::overload_cast<const py::handle&, const py::handle&, const py::handle&>(
               &RowDescription::fits, py::const_),
           py::arg("param"), py::arg("grad"), py::arg("state"));
  py::class_<StepDescription>(m, "StepDescription", py::custom_type_setup(&let_collect))
      .def(py::init<py::list, py::list, py::list, py::list, py::handle>(), py::arg("params"),
           py::arg("rows"), py::arg("versioned"), py::arg("tables"), py::arg("states"))
      .def("begin", &StepDescription::begin, py::arg("groups"), py::arg("states"))
      .def("let_go", &StepDescription::let_go)
      .def("end", &StepDescription::end)
      .def("marks", &StepDescription::marks)
      .def_property_readonly("edition", &StepDescription::edition);
}

}  // namespace pycomm::bind

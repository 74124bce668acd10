#include "bind/gil.h"

#include <unistd.h>

#include <utility>

#include "bind/python.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

thread_local PyObject* turn_of_thread = nullptr;

// Calls a function; if it throws, sleeps forever. This includes the unwinding by which CPython ends
// a thread, so that the frames above are not unwound.
template <class Function>
auto or_sleep(Function function) noexcept {
  try {
    return function();
  } catch (...) {
    while (true) pause();
  }
}

// Destructors cannot throw, and a rank that has lost its turn must not continue silently: errors
// are printed.
void call_turn(PyObject* turn, const char* method) {
  const WithGil gil;
  const py::error_scope raising;  // the caller may be raising an error
  PyObject* const none = or_sleep([&] { return PyObject_CallMethod(turn, method, nullptr); });
  if (none == nullptr) PyErr_WriteUnraisable(turn);
  Py_XDECREF(none);
}

}  // namespace

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

void set_turn(const py::object& turn) {
  PyObject* const before = turn_of_thread;
  turn_of_thread = turn.is_none() ? nullptr : turn.inc_ref().ptr();
  WithoutTurn::threads_with_turns += (turn_of_thread != nullptr) - (before != nullptr);
  Py_XDECREF(before);
}

// Code that runs meanwhile, such as a signal's handler, has no turn to give up.
PyObject* WithoutTurn::give_up() {
  PyObject* const turn = std::exchange(turn_of_thread, nullptr);
  if (turn != nullptr) call_turn(turn, "give_up");
  return turn;
}

void WithoutTurn::take() {
  call_turn(turn_, "take");
  turn_of_thread = turn_;
}

KeepTurn::KeepTurn() : turn_(std::exchange(turn_of_thread, nullptr)) {}
KeepTurn::~KeepTurn() { turn_of_thread = turn_; }

WithoutGil::~WithoutGil() {
  or_sleep([this] { PyEval_RestoreThread(state_); });
}

WithGil::WithGil() {
  // A thread that is new to the interpreter cannot even ask for the lock while it finalizes.
  while (PyGILState_GetThisThreadState() == nullptr && finalizing()) pause();
  state_ = or_sleep([] { return PyGILState_Ensure(); });
}

void call_python(const pybind11::function& function, const pybind11::tuple& arguments) {
  PyObject* const result =
      or_sleep([&] { return PyObject_CallObject(function.ptr(), arguments.ptr()); });
  if (result == nullptr) throw_python_error();
  Py_DECREF(result);
}

}  // namespace pycomm::bind

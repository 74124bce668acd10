#include "bind/gil.h"

#include <unistd.h>

#include "bind/python.h"

namespace pycomm::bind {
namespace {

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

}  // namespace

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}

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

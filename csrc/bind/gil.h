// The interpreter's lock, for threads that may outlive the interpreter. Up to Python 3.13, a thread
// that asks for the lock while the interpreter finalises is ended by unwinding its stack, and the first
// destructor on the way ends the process instead. Here such a thread sleeps until the process has
// ended, as it does in Python 3.14.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::bind {

// Whether the interpreter finalises, or has.
bool finalizing();

// Releases the lock; takes it again at the end.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Takes the lock, on any thread; a thread that has it keeps it.
class WithGil {
 public:
  WithGil();
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Calls into Python from below C++ frames. Throws PythonError.
void call_python(const pybind11::function& function, const pybind11::tuple& arguments);

}  // namespace pycomm::bind

// The interpreter's lock (GIL), for threads that may outlive the interpreter. Up to Python 3.13, if
// a thread asks for the lock while the interpreter finalizes, CPython ends it by unwinding its
// stack, and the first destructor on the way terminates the process. Here such a thread sleeps
// until the process has ended, as in Python 3.14.
#pragma once

#include <pybind11/pybind11.h>

namespace pycomm::bind {

// True if the interpreter is finalizing or has been finalized.
bool finalizing();

// Releases the lock, and takes it again when destroyed.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Takes the lock, on any thread; no effect if the thread has it already.
class WithGil {
 public:
  WithGil();
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Calls a Python function from C++. Throws PythonError if it raises.
void call_python(const pybind11::function& function, const pybind11::tuple& arguments);

}  // namespace pycomm::bind

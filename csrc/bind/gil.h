// The interpreter's lock (GIL), for threads that may outlive the interpreter. Up to Python 3.13, if
// a thread asks for the lock while the interpreter finalizes, CPython ends it by unwinding its
// stack, and the first destructor on the way terminates the process. Here such a thread sleeps
// until the process has ended, as in Python 3.14.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>

namespace pycomm::bind {

// True if the interpreter is finalizing or has been finalized.
bool finalizing();

// Other ranks of a LocalWorld with serial=True may run while one exists, if this thread is a rank of
// it. The thread may have the GIL or not; it waits for its next turn without.
class WithoutTurn {
 public:
  WithoutTurn() : turn_(threads_with_turns == 0 ? nullptr : give_up()) {}
  ~WithoutTurn() {
    if (turn_ != nullptr) take();
  }
  WithoutTurn(const WithoutTurn&) = delete;
  WithoutTurn& operator=(const WithoutTurn&) = delete;

 private:
  friend void set_turn(const pybind11::object& turn);

  static PyObject* give_up();
  void take();

  static inline std::atomic<int> threads_with_turns{0};
  PyObject* const turn_;  // null if there is none
};

// Makes `turn` this thread's: its methods give_up() and take() are called around whatever may wait.
// None: the thread has no turns.
void set_turn(const pybind11::object& turn);

// While one exists, this thread keeps its turn. For destructors: garbage is collected at any time, also
// while the thread holds a lock that another rank waits for in its turn.
class KeepTurn {
 public:
  KeepTurn();
  ~KeepTurn();
  KeepTurn(const KeepTurn&) = delete;
  KeepTurn& operator=(const KeepTurn&) = delete;

 private:
  PyObject* const turn_;
};

// Releases the lock, and the turn, and takes both again when destroyed.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  const WithoutTurn no_turn_;  // given up and taken with the GIL
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

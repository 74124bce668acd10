// How the backend reaches pycomm._C: its table of functions, Python exceptions as C++ exceptions,
// and a group that is connected when it is first used.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>

#include "core/backend_table.h"

namespace pycomm::c10d {

// The table; find_native() looks it up when the module is imported.
const BackendTable& native();
void find_native();

// Turns a Python exception into one that C++ can throw. Takes the reference. A ValueError or a
// TypeError becomes one for torch.distributed (c10d/arguments.h).
std::exception_ptr as_exception(Error error);

inline void check(Error error) {
  if (error != nullptr) std::rethrow_exception(as_exception(error));
}

// Calls function() with the GIL, on any thread, also while the interpreter finalizes.
template <class Function>
void with_gil(Function function) {
  native().with_gil([](void* context) { (*static_cast<Function*>(context))(); }, &function);
}

// While one exists, this thread runs a callback of a group of pycomm._C. The thread may be the
// group's own worker, so it must not destroy the group: a thread cannot join itself.
class CallingBack {
 public:
  CallingBack();
  ~CallingBack();
  CallingBack(const CallingBack&) = delete;
  CallingBack& operator=(const CallingBack&) = delete;
};

// Drops a reference to a Python object, which may be the last one to a group: at once, or on
// another thread if this thread is running a callback.
void drop(pybind11::object object);

// As long as it exists, this thread does not hold the GIL.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check() != 0) no_gil_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> no_gil_;
};

// Holds a mutex, without the GIL, so that no thread holds one and waits for the other.
class LockWithoutGil {
 public:
  explicit LockWithoutGil(std::mutex& mutex) : lock_(mutex) {}

 private:
  const WithoutGil no_gil_;
  const std::unique_lock<std::mutex> lock_;
};

// A group of pycomm._C, made by a Python function at its first use.
class Connection {
 public:
  // `connect` returns a pycomm.Group.
  Connection(int rank, pybind11::object connect) : rank_(rank), connect_(std::move(connect)) {}
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int rank() const { return rank_; }
  // The group's handle. Connects at the first call.
  void* group() {
    void* const found = handle_.load(std::memory_order_acquire);
    return found != nullptr ? found : connect();
  }
  // True if the group spans nodes.
  bool spans_nodes() { return group(), spans_nodes_; }
  // The handle of the group's CUDA side. The first call connects the devices, in a collective call.
  void* cuda_side(c10::Device device);
  // The stream of operations that do not run on the caller's.
  c10::Stream stream(c10::Device device) { return stream(stream_, device, true); }
  // One that does nothing, unless torch has given it to somebody else, too.
  c10::Stream idle_stream(c10::Device device) { return stream(idle_stream_, device, false); }

 private:
  c10::Stream stream(std::optional<c10::Stream>& of, c10::Device device, bool high_priority);
  void* connect();

  const int rank_;
  std::mutex connecting_;
  std::atomic<void*> handle_{nullptr};
  pybind11::object connect_;
  pybind11::object group_;
  bool spans_nodes_ = false;
  void* cuda_handle_ = nullptr;
  std::optional<c10::Device> device_;
  pybind11::object cuda_side_;
  std::mutex making_stream_;
  std::optional<c10::Stream> stream_, idle_stream_;
};

}  // namespace pycomm::c10d

// The functions that the torch.distributed backend calls.
#include "core/backend_table.h"

#include <pybind11/pybind11.h>

#include "bind/fast_call.h"
#include "bind/gil.h"
#include "bind/python.h"
#include "cpu/group/group.h"
#include "cuda/group.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cpu::Group;
using cpu::Heap;
using cpu::p2p::RequestPtr;

// True if the exception that is being handled stands for the one in the thread's error indicator.
bool is_python_error() {
  try {
    throw;
  } catch (const PythonError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// The exception that is being handled, as a Python object. An exception that this thread is raising
// meanwhile stays in the error indicator.
Error current_error() noexcept {
  const WithGil gil;
  PyObject *raising_type = nullptr, *raising = nullptr, *raising_trace = nullptr;
  if (!is_python_error()) PyErr_Fetch(&raising_type, &raising, &raising_trace);
  set_python_error();
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  PyErr_Restore(raising_type, raising, raising_trace);
  return value;
}

template <class Function>
Error guarded(const Function& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (...) {
    return current_error();
  }
}

Error run(void* group, const Call* calls, std::size_t count) {
  return guarded([&] {
    for (std::size_t i = 0; i < count; ++i)
      static_cast<Group*>(group)->run(calls[i], check_signals);
  });
}

struct Listener {
  void (*completed)(void* context, Error error);
  void* context;

  static void call(void* self, std::exception_ptr error) {
    const std::unique_ptr<Listener> listener(static_cast<Listener*>(self));
    listener->completed(listener->context, error == nullptr ? nullptr : guarded([&] {
                          std::rethrow_exception(std::move(error));
                        }));
  }
};

Error submit(void* group, const Call* calls, std::size_t count,
             void (*completed)(void* context, Error error), void* context) {
  return guarded([&] {
    auto listener = std::make_unique<Listener>(Listener{completed, context});
    static_cast<Group*>(group)->submit({calls, calls + count}, {&Listener::call, listener.get()});
    listener.release();
  });
}

static_assert(kAnySource == cpu::p2p::kAnySource);

bool reaches(void* group, int device, int peer, std::int64_t bytes) {
  return static_cast<Group*>(group)->reaches(device, peer, bytes);
}

Error start_message(void* group, void* data, const Message& message,
                    void (*completed)(void* context), void* context, void** request) {
  return guarded([&] {
    Group& self = *static_cast<Group*>(group);
    const cpu::p2p::Envelope envelope{message.peer, message.tag, message.element, message.bytes};
    const cpu::p2p::Options options{.timeout = timeout_of(message.timeout),
                                    .callback = {completed, context},
                                    .on_device = message.on_device,
                                    .stream = message.stream};
    auto started = std::make_unique<RequestPtr>();
    *started = message.receives ? self.irecv(data, envelope, options)
                                : self.isend(data, envelope, options);
    *request = started.release();
  });
}

Error wait_message(void* request, double patience, bool* completed) {
  return guarded([&] {
    cpu::p2p::Request& self = **static_cast<RequestPtr*>(request);
    *completed = true;
    if (patience < 0) return self.wait(check_signals);
    const std::chrono::duration<double> seconds(patience);
    *completed = self.wait(std::chrono::duration_cast<cpu::Clock::duration>(seconds));
  });
}

// Unlike wait(), this does not count as telling the caller.
Error error_of(void* request) {
  return guarded([&] {
    const std::exception_ptr& error = (*static_cast<RequestPtr*>(request))->error;
    if (error != nullptr) std::rethrow_exception(error);
  });
}

int source_of(void* request) { return (*static_cast<RequestPtr*>(request))->source; }

bool arrived_on_device(void* request) {
  return (*static_cast<RequestPtr*>(request))->arrived_on_device;
}

void release_message(void* request) { delete static_cast<RequestPtr*>(request); }

Error check_waiting(void* group) {
  return guarded([&] {
    if (static_cast<Group*>(group)->forked()) static_cast<Group*>(group)->check_usable();
    check_signals();
  });
}

void abort(void* group) { static_cast<Group*>(group)->abort(); }

struct Owner {
  std::shared_ptr<Heap> heap;
  std::byte* data;
};

Error allocate(void* group, std::int64_t bytes, void** data, void** owner) {
  return guarded([&] {
    const std::shared_ptr<Heap> heap = static_cast<Group*>(group)->heap();
    auto allocation = std::make_unique<Owner>(Owner{heap, heap->allocate(bytes)});
    *data = allocation->data;
    *owner = allocation.release();
  });
}

void free_memory(void* owner) {
  const std::unique_ptr<Owner> found(static_cast<Owner*>(owner));
  found->heap->free(found->data);
}

Error enqueue(void* side, const Call* calls, std::size_t count, std::uintptr_t stream) {
  return guarded([&] {
    for (std::size_t i = 0; i < count; ++i) static_cast<cuda::Group*>(side)->run(calls[i], stream);
  });
}

Error check_kernels(void* side) {
  return guarded([&] { static_cast<cuda::Group*>(side)->check(); });
}

constexpr BackendTable kTable = {
    .layout = kBackendTableLayout,
    .run = run,
    .submit = submit,
    .reaches = reaches,
    .start_message = start_message,
    .wait_message = wait_message,
    .error_of = error_of,
    .source_of = source_of,
    .arrived_on_device = arrived_on_device,
    .release_message = release_message,
    .with_gil =
        [](void (*function)(void*), void* context) {
          const WithGil gil;
          function(context);
        },
    .check_waiting = check_waiting,
    .abort = abort,
    .allocate = allocate,
    .free_memory = free_memory,
    .enqueue = enqueue,
    .check_kernels = check_kernels,
    .has_passed = cuda::completed,
};

}  // namespace

void bind_backend_table(py::module_& m) {
  m.attr("backend_table") = py::capsule(&kTable, kBackendTableName);
}

}  // namespace pycomm::bind

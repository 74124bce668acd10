// What the torch.distributed backend (csrc/c10d) calls in pycomm._C: a table of functions, which
// travels in a PyCapsule. The backend is compiled against one version of torch and pycomm._C works
// with all of them, so they are two modules, which share only headers of core/.
#pragma once

#include <cstddef>

#include "core/call.h"

struct _object;  // PyObject

namespace pycomm {

// A new reference to a Python exception, or null if all is well.
using Error = _object*;

// A send or a receive. `peer` is the destination, or the source; kAnySource for any.
struct Message {
  bool receives;
  int peer;
  std::int32_t tag;
  Element element;
  std::int64_t bytes;
  double timeout;  // the longest time without progress while a thread waits, in seconds
  // If reaches() says so: the tensor on its device. A send's is ready after the stream's work so far, a
  // receive's at once.
  void* on_device = nullptr;
  std::uintptr_t stream = 0;
};
inline constexpr int kAnySource = -1;

struct BackendTable {
  // The sizes of what both modules compile. They differ if the two come from different sources.
  std::uint64_t layout;

  // The functions take the pointer of a group's capsule, and are called without the GIL.
  // Runs calls in order; blocks.
  Error (*run)(void* group, const Call* calls, std::size_t count);
  // Submits calls. If this returns no error, `completed` is called once, by another thread.
  Error (*submit)(void* group, const Call* calls, std::size_t count,
                  void (*completed)(void* context, Error error), void* context);
  // True if a message from or to a device can stay on devices.
  bool (*reaches)(void* group, int device, int peer, std::int64_t bytes);
  // Starts a send or a receive. When it has completed or failed, `completed` is called once, by any
  // thread, and may be called before this returns. release_message() takes what this stores in
  // `request`.
  Error (*start_message)(void* group, void* data, const Message& message,
                         void (*completed)(void* context), void* context, void** request);
  // Waits for at most `seconds`, or until the message has completed if negative; signals' handlers
  // run only then. This thread drives the group's messages meanwhile. Stores whether the message has
  // completed.
  Error (*wait_message)(void* request, double seconds, bool* completed);
  // For a message that has ended: why it failed, or null; and of a receive the source, and whether the
  // message is on the device.
  Error (*error_of)(void* request);
  int (*source_of)(void* request);
  bool (*arrived_on_device)(void* request);
  void (*release_message)(void* request);
  // Calls function(context) with the GIL, which the calling thread may have or not. A thread that
  // asks for it while the interpreter finalizes sleeps until the process has ended.
  void (*with_gil)(void (*function)(void* context), void* context);
  // For waits: returns an exception if a signal's handler has raised one, or if this process is a fork
  // of the group's, in which no operation completes.
  Error (*check_waiting)(void* group);
  void (*abort)(void* group);
  // Memory in the group's window; null, with an error, if there is none. free_memory() takes what
  // allocate() has stored in `owner`.
  Error (*allocate)(void* group, std::int64_t bytes, void** data, void** owner);
  void (*free_memory)(void* owner);

  // These take the pointer of the capsule of a group's CUDA side.
  // Enqueues calls on a stream, in order.
  Error (*enqueue)(void* side, const Call* calls, std::size_t count, std::uintptr_t stream);
  // Returns the error of kernels that have run so far; waits for nothing.
  Error (*check_kernels)(void* side);
  // True if all work that an event has recorded is complete. Unlike torch's query, this does not break
  // a capture on another thread.
  bool (*has_passed)(std::uintptr_t event);
};

inline constexpr const char* kBackendTableName = "pycomm.backend_table";
inline constexpr const char* kGroupCapsule = "pycomm.group";
inline constexpr const char* kCudaCapsule = "pycomm.cuda_group";
inline constexpr std::uint64_t kBackendTableLayout = hash_of(
    {sizeof(BackendTable), sizeof(Call), sizeof(Operation), sizeof(Details), sizeof(Message),
     kCountOf<Collective>, kCountOf<DType>, kCountOf<ReduceOp>, kCountOf<Element>});

}  // namespace pycomm

// What the engine of messages (cpu/p2p/engine.h) asks of this rank's device: copies between its
// memory and the windows of the node's ranks.
#pragma once

#include <memory>

#include "core/layout.h"

namespace pycomm {

// Called on any thread, mark() by several at a time and the others by one. Nothing waits unless it
// says so. A place counts the bytes of a rank's window and of what was added to its heap; if the ranks
// are threads, it is an address.
class DeviceCopies {
 public:
  // Work of a device; null if there is none.
  using Mark = std::shared_ptr<void>;

  virtual ~DeviceCopies() = default;
  virtual int device() const = 0;
  // Makes the device this thread's current one. For a thread that works for nothing else: elsewhere
  // the functions below restore the current device, which may set up one that nobody uses.
  virtual void make_current() const noexcept = 0;
  // The part of this rank's window for pieces of messages.
  virtual Range slots() const = 0;
  // Where other ranks find this rank's memory; kNotInWindow if they cannot use it.
  virtual std::int64_t place_of(const void* data, std::int64_t bytes) const = 0;
  // What has been enqueued on a stream so far.
  virtual Mark mark(std::uintptr_t stream) = 0;
  // True if the work is complete; then the mark becomes null.
  virtual bool passed(Mark& mark) = 0;
  // Start a copy to a place of this rank, or from a place of another rank. fetch() trusts no place:
  // it throws std::invalid_argument.
  virtual Mark put(std::int64_t place, const void* from, std::int64_t bytes) = 0;
  virtual Mark fetch(void* to, int rank, std::int64_t place, std::int64_t bytes) = 0;
  // Waits until no copy runs. Copies wait for no other work, so this takes no longer than they do.
  virtual void finish() noexcept = 0;
};

}  // namespace pycomm

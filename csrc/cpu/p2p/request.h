// A send or a receive, as a future.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include "core/device_copies.h"
#include "cpu/executor/store_policy.h"
#include "cpu/p2p/frame.h"

namespace pycomm::cpu::p2p {

class Engine;

inline constexpr int kAnySource = -1;

// A message as a caller describes it. `peer` is the destination of a send, and the source of a
// receive or kAnySource. Ranks are numbered as in the whole group.
struct Envelope {
  int peer;
  std::int32_t tag;
  Element element;
  std::int64_t bytes;
  Channel channel = Channel::program;
};

// Called once when a request has completed or failed, on the thread that completes it, without a
// lock.
struct Callback {
  void (*function)(void* context) = nullptr;
  void* context = nullptr;
};

struct Options {
  // The longest time without progress; zero for the group's timeout.
  Clock::duration timeout = {};
  // Called from time to time during a long wait; if it throws, the group is aborted.
  void (*interrupt)() = nullptr;
  Callback callback = {};
  // The timeout also counts while no thread waits for the request.
  bool always_timed = false;
  // The caller will soon wait for the request, so no other thread needs to drive it.
  bool waited_for = false;
  // The tensor, if Engine::reaches() says so: a send's after all work of this stream so far, a
  // receive's when nothing uses it. A receive also needs host memory, for messages from there.
  void* on_device = nullptr;
  std::uintptr_t stream = 0;
};

// Callers use the methods and the source only.
struct Request {
  static constexpr Clock::duration kUnset = Clock::duration::min();

  // Returns true if the request has completed within `patience`. Throws what made it fail.
  bool wait(Clock::duration patience);
  // Waits without any limit except the timeout. If `interrupt` throws, the group is aborted.
  void wait(void (*interrupt)() = nullptr);
  bool completed() const { return done.load(std::memory_order_acquire); }
  // The rank that has sent a received message; valid once the request has completed.
  int source = kAnySource;
  // True if it is on the device, false if it is in host memory.
  bool arrived_on_device = false;

  // The text for error messages.
  std::string describe() const;
  const char* name() const { return receives ? "recv" : "send"; }

  // The rest belongs to the engine, under its lock.
  Engine* engine = nullptr;
  bool receives = false;
  std::byte* data = nullptr;
  std::byte* on_device = nullptr;
  DeviceCopies::Mark ready = {};  // what a send on the device waits for
  Envelope envelope = {};
  int peer = 0;  // the envelope's, or the source that a message for any source has come from
  std::uint32_t number = 0;
  Callback callback = {};

  bool matched = false;  // a receive has a message, some of whose bytes are still to come
  // The offset of `data` in this rank's heap if the other rank may access it there.
  std::int64_t exposed_at = kNotInWindow;
  Clock::duration timeout = {};
  bool always_timed = false;
  Clock::duration since = kUnset;  // the time of the last progress, set when it is next needed
  int waiters = 0;
  std::size_t place = 0;  // among the pending requests
  void rethrow();
  std::exception_ptr error = nullptr;
  bool ended_alone = false;  // the group has not failed
  std::shared_ptr<std::atomic<bool>> told = nullptr;
  std::atomic<bool> done = false;
};

using RequestPtr = std::shared_ptr<Request>;

// "4 float32".
std::string describe(std::int64_t bytes, Element element);

}  // namespace pycomm::cpu::p2p

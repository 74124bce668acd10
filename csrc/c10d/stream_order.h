// How an operation orders with the streams of its tensors' device.
//
// It runs on the caller's stream, or on another one after what the caller's stream has to do so far.
// Then other streams wait for it when their programs ask for that. Without torch's CUDA headers, so
// that the module can be compiled for a torch without CUDA, too.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace pycomm::c10d {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class StreamOrder {
 public:
  // An operation on `stream`, which the current stream's caller begins now.
  explicit StreamOrder(c10::Stream stream)
      : stream_(stream), caller_(current_stream(stream.device())), done_(stream.device_type()) {
    if (stream_ == caller_) return;
    c10::Event begun(stream.device_type());
    begun.record(caller_);
    begun.block(stream_);
  }

  c10::Stream stream() const { return stream_; }
  // Calls function() with the operation's stream as the current one; the operation is then enqueued.
  template <class Function>
  void run(const Function& function) {
    const c10::StreamGuard guard(stream_);
    function();
    done_.record(stream_);
  }
  // Lets the current stream wait for the operation. Returns true if that is the stream of the caller, so
  // that memory of the operation can be freed in the caller's order.
  bool block_current_stream() const {
    const c10::Stream current = current_stream(stream_.device());
    if (current != stream_) done_.block(current);
    return current == caller_;
  }
  // True if the caller's stream is the operation's.
  bool is_callers() const { return stream_ == caller_; }
  // The event after the operation.
  std::uintptr_t done() const { return reinterpret_cast<std::uintptr_t>(done_.eventId()); }

 private:
  c10::Stream stream_, caller_;
  c10::Event done_;
};

}  // namespace pycomm::c10d

// The copies of messages on CUDA. Host code.
//
// Callers start a copy when its memory is ready, and look whether it is complete. So the two streams
// here wait for no other stream, and copies on them for nothing but the device.
#pragma once

#include "core/device_copies.h"
#include "cuda/endpoint.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

class MessageCopies final : public DeviceCopies {
 public:
  // `heap`: what other ranks may use of a window.
  MessageCopies(const EndpointOptions& options, Range heap) : options_(options), heap_(heap) {}
  ~MessageCopies() override {
    for (const cudaStream_t stream : {putting_, fetching_}) {
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
    }
  }

  int device() const override { return options_.device; }
  void make_current() const noexcept override { (void)cudaSetDevice(options_.device); }
  Range slots() const override { return {heap_.begin, options_.message_bytes}; }

  std::int64_t place_of(const void* data, std::int64_t bytes) const override {
    const auto place =
        static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) - base(options_.rank));
    return is_inside(place, bytes) ? place : kNotInWindow;
  }

  Mark mark(std::uintptr_t stream) override {
    return recorded(reinterpret_cast<cudaStream_t>(stream), [] {});
  }

  bool passed(Mark& mark) override {
    if (mark == nullptr) return true;
    if (!completed(reinterpret_cast<std::uintptr_t>(
            static_cast<cudaEvent_t>(*static_cast<Event*>(mark.get()))))) {
      return false;
    }
    mark.reset();
    return true;
  }

  Mark put(std::int64_t place, const void* from, std::int64_t bytes) override {
    return copied(putting_, address(options_.rank, place), from, bytes);
  }

  Mark fetch(void* to, int rank, std::int64_t place, std::int64_t bytes) override {
    PYCOMM_CHECK(is_inside(place, bytes), "a piece of a message lies outside of the heap");
    return copied(fetching_, to, address(rank, place), bytes);
  }

  void finish() noexcept override {
    const BesideCaptures beside;
    for (const cudaStream_t stream : {putting_, fetching_}) {
      if (stream != nullptr) (void)cudaStreamSynchronize(stream);
    }
  }

 private:
  // Threads have one address space.
  std::uintptr_t base(int rank) const {
    return options_.one_address_space ? 0 : options_.windows[static_cast<std::size_t>(rank)];
  }
  void* address(int rank, std::int64_t place) const {
    return reinterpret_cast<void*>(base(rank) + static_cast<std::uintptr_t>(place));
  }
  bool is_inside(std::int64_t place, std::int64_t bytes) const {
    if (options_.one_address_space) return true;
    const std::int64_t end = heap_.begin + heap_.count;
    return place >= heap_.begin && place <= end && bytes <= end - place;
  }

  Mark copied(cudaStream_t& stream, void* to, const void* from, std::int64_t bytes) {
    if (stream == nullptr) {
      const BesideCaptures beside;
      const DeviceGuard guard(options_.device);
      PYCOMM_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    return recorded(stream, [&] {
      PYCOMM_CUDA_CHECK(
          cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream));
    });
  }

  // An event after what enqueue() enqueues on a stream.
  template <class Enqueue>
  Mark recorded(cudaStream_t stream, const Enqueue& enqueue) {
    const BesideCaptures beside;
    const DeviceGuard guard(options_.device);
    enqueue();
    auto event = std::make_shared<Event>();
    PYCOMM_CUDA_CHECK(cudaEventRecord(*event, stream));
    return event;
  }

  const EndpointOptions options_;
  const Range heap_;
  cudaStream_t putting_ = nullptr, fetching_ = nullptr;  // made when they are needed
};

}  // namespace pycomm::cuda

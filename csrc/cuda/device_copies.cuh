// The copies of messages on CUDA. Host code.
//
// Callers start a copy when its memory is ready, and look whether it is complete. So the two streams
// here wait for no other stream, and copies on them for nothing but the device.
#pragma once

#include "core/device_copies.h"
#include "cuda/regions.cuh"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

class MessageCopies final : public DeviceCopies {
 public:
  MessageCopies(int device, int rank, std::shared_ptr<const Regions> regions, Range slots)
      : device_(device),
        rank_(static_cast<std::size_t>(rank)),
        regions_(std::move(regions)),
        slots_(slots) {}
  ~MessageCopies() override {
    for (const cudaStream_t stream : {putting_, fetching_}) {
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
    }
  }

  int device() const override { return device_; }
  void make_current() const noexcept override { (void)cudaSetDevice(device_); }
  Range slots() const override { return slots_; }

  std::int64_t place_of(const void* data, std::int64_t bytes) const override {
    return regions_->place_of(data, bytes);
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
    return copied(putting_, regions_->address_of(rank_, place, bytes), from, bytes);
  }

  Mark fetch(void* to, int rank, std::int64_t place, std::int64_t bytes) override {
    const auto from = static_cast<std::size_t>(rank);
    return copied(fetching_, to, regions_->address_of(from, place, bytes), bytes);
  }

  void finish() noexcept override {
    const BesideCaptures beside;
    for (const cudaStream_t stream : {putting_, fetching_}) {
      if (stream != nullptr) (void)cudaStreamSynchronize(stream);
    }
  }

 private:
  Mark copied(cudaStream_t& stream, void* to, const void* from, std::int64_t bytes) {
    if (stream == nullptr) {
      const BesideCaptures beside;
      const DeviceGuard guard(device_);
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
    const DeviceGuard guard(device_);
    enqueue();
    auto event = std::make_shared<Event>();
    PYCOMM_CUDA_CHECK(cudaEventRecord(*event, stream));
    return event;
  }

  const int device_;
  const std::size_t rank_;
  const std::shared_ptr<const Regions> regions_;
  const Range slots_;
  cudaStream_t putting_ = nullptr, fetching_ = nullptr;  // made when they are needed
};

}  // namespace pycomm::cuda

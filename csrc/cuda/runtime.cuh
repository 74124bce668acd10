// Calls of the CUDA runtime: errors as exceptions, the current device, launches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/layout.h"

namespace pycomm::cuda {

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}
#define PYCOMM_CUDA_CHECK(call) ::pycomm::cuda::check((call), #call)

// Makes a device current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    PYCOMM_CUDA_CHECK(cudaGetDevice(&before_));
    changed_ = before_ != device;
    if (changed_) PYCOMM_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// An event of the current device that others wait for.
class Event {
 public:
  Event() { PYCOMM_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Lets this thread call the runtime while other threads capture, without breaking their captures.
class BesideCaptures {
 public:
  BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The number of blocks that a device runs at once, or the number of pieces of work if that is less.
inline std::int64_t blocks_for(std::int64_t pieces, int per_processor, int device) {
  int processors = 0;
  PYCOMM_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return std::clamp<std::int64_t>(pieces, 1, std::int64_t{processors} * per_processor);
}

// All kernels that this library can launch.
inline std::vector<const void*>& kernels() {
  static std::vector<const void*> all;
  return all;
}

template <class K>
K* listed(K* kernel) {
  kernels().push_back(reinterpret_cast<const void*>(kernel));
  return kernel;
}

// A kernel; naming it here makes it one of kernels() before main().
template <auto kernel>
inline const auto kKernel = listed(kernel);

template <auto kernel, class L>
inline constexpr bool takes = std::is_same_v<decltype(kernel), void (*)(L)>;

// Launches blocks that do not wait for blocks of other ranks.
template <auto kernel, class L>
void launch_blocks(std::int64_t blocks, const L& launch, cudaStream_t stream,
                   int threads = kThreads) {
  static_assert(takes<kernel, L>);
  void* arguments[] = {const_cast<L*>(&launch)};
  PYCOMM_CUDA_CHECK(cudaLaunchKernel(kKernel<kernel>, dim3(static_cast<unsigned>(blocks)),
                                     dim3(static_cast<unsigned>(threads)), arguments, 0, stream));
}

}  // namespace pycomm::cuda

// A group of ranks that share one device, which is a CPU (device/cuda_runtime.h).
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/endpoint.h"

namespace pycomm::test {

inline constexpr int kLanes = 2;

class DeviceWorld {
 public:
  static constexpr int kDevice = 1;  // not the current one of the threads that use it

  explicit DeviceWorld(int n, double timeout = 60, bool stage_always = false)
      : DeviceWorld(n, timeout, stage_always, staging_bytes(n)) {}
  DeviceWorld(int n, double timeout, bool stage_always, std::int64_t staging) {
    const std::int64_t bytes = cuda::window_bytes(n, kLanes, staging, 0);
    for (int r = 0; r < n; ++r) {
      // Aligned and zero-initialised, as a window must be.
      memory_.emplace_back(static_cast<std::size_t>(bytes) + 4096);
      windows.push_back((reinterpret_cast<std::uintptr_t>(memory_[r].data()) + 4095) / 4096 * 4096);
    }
    for (int r = 0; r < n; ++r) {
      endpoints.push_back(
          std::make_shared<cuda::Endpoint>(cuda::EndpointOptions{kDevice,
                                                                 r,
                                                                 n,
                                                                 kLanes,
                                                                 staging,
                                                                 timeout,
                                                                 {bytes, windows, {}, 0},
                                                                 true,
                                                                 stage_always,
                                                                 kLine}));
    }
    shared = std::make_shared<cuda::SharedLaunch>(endpoints);
  }

  static std::int64_t staging_bytes(int n) {
    return std::max(cuda::least_staging_bytes(n, kLanes), std::int64_t{4} << 20);
  }

  std::vector<std::uintptr_t> windows;
  std::vector<std::shared_ptr<cuda::Endpoint>> endpoints;
  std::shared_ptr<cuda::SharedLaunch> shared;

 private:
  std::vector<std::vector<std::byte>> memory_;
};

}  // namespace pycomm::test

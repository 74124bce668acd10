// Ranks that have a device each, and whose hosts do not wait for each other, so that only what kernels
// do orders one rank's accesses with another's.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "cuda/endpoint.h"
#include "cuda/multimem.cuh"

namespace pycomm::test {

class RaceWorld {
 public:
  RaceWorld(int n, int lanes, bool stage_always) : n_(n) {
    const std::int64_t staging = cuda::least_staging_bytes(n, lanes);
    const std::int64_t bytes = cuda::window_bytes(n, lanes, staging, 0);
    std::vector<std::uintptr_t> windows;
    for (int r = 0; r < n; ++r) {
      memory_.emplace_back(static_cast<std::size_t>(bytes) + 4096);
      windows.push_back((reinterpret_cast<std::uintptr_t>(memory_[r].data()) + 4095) / 4096 * 4096);
    }
    const std::uintptr_t multicast = device::make_multicast(windows);
    for (int r = 0; r < n; ++r) {
      endpoints_.push_back(
          std::make_unique<cuda::Endpoint>(cuda::EndpointOptions{r,
                                                                 r,
                                                                 n,
                                                                 lanes,
                                                                 staging,
                                                                 60,
                                                                 {bytes, windows, {}, multicast},
                                                                 true,
                                                                 stage_always,
                                                                 kLine,
                                                                 0}));
    }
  }

  int size() const { return n_; }
  cuda::Endpoint& operator[](int r) { return *endpoints_[static_cast<std::size_t>(r)]; }

  // Calls body(r) on a thread per rank, then waits for its device.
  template <class Body>
  void run(const Body& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < n_; ++r) {
      threads.emplace_back([&, r] {
        cudaSetDevice(r);
        body(r);
        (*this)[r].synchronize();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int r = 0; r < n_; ++r) {
      PYCOMM_CHECK((*this)[r].failure().reason == Reason::none, "no operation fails");
    }
  }

  // Writes a tensor on the default stream, as whatever uses it next does.
  static void write(std::vector<float>& tensor) {
    cudaMemsetAsync(tensor.data(), 1, tensor.size() * sizeof(float), nullptr);
  }

 private:
  int n_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::unique_ptr<cuda::Endpoint>> endpoints_;
};

}  // namespace pycomm::test

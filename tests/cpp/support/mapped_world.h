// A group of ranks on a device that is a CPU (device/cuda_runtime.h), as separate processes have it. Each rank maps all
// windows for itself, so a window lies at another address for each rank. Only heaps can be read by
// other ranks, and each rank has launches of its own.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda/multimem.cuh"
#include "support/device_world.h"

namespace pycomm::test {

class MappedWorld {
 public:
  explicit MappedWorld(int n, std::int64_t heap_bytes, double timeout = 60)
      : heap_bytes_(heap_bytes),
        heap_begin_(cuda::heap_begin(n, kLanes, DeviceWorld::staging_bytes(n))) {
    const std::int64_t staging = DeviceWorld::staging_bytes(n);
    bytes_ = cuda::window_bytes(n, kLanes, staging, heap_bytes);
    std::vector<int> files;
    for (int r = 0; r < n; ++r) {
      files.push_back(memfd_create("window", MFD_CLOEXEC));
      if (ftruncate(files.back(), bytes_) != 0) throw std::runtime_error("no memory for windows");
    }
    for (int r = 0; r < n; ++r) {
      std::vector<std::uintptr_t> windows;
      for (const int file : files) windows.push_back(map(file));
      heaps_.push_back(reinterpret_cast<std::byte*>(windows[r]) + heap_begin_);
      const std::uintptr_t multicast = device::make_multicast(windows);
      endpoints.push_back(std::make_unique<cuda::Endpoint>(
          cuda::EndpointOptions{0, r, n, kLanes, staging, bytes_, timeout, std::move(windows),
                                false, false, kLine, 0, multicast}));
    }
    for (const int file : files) close(file);
  }
  ~MappedWorld() {
    endpoints.clear();
    for (void* const mapping : mappings_) munmap(mapping, static_cast<std::size_t>(bytes_));
  }
  MappedWorld(const MappedWorld&) = delete;
  MappedWorld& operator=(const MappedWorld&) = delete;

  // Rank r's heap, where rank r sees it.
  std::byte* heap(int r) const { return heaps_[static_cast<std::size_t>(r)]; }

  std::int64_t heap_bytes() const { return heap_bytes_; }

  std::vector<std::unique_ptr<cuda::Endpoint>> endpoints;

 private:
  std::uintptr_t map(int file) {
    void* const mapping = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_READ | PROT_WRITE,
                               MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) throw std::runtime_error("a window cannot be mapped");
    mappings_.push_back(mapping);
    return reinterpret_cast<std::uintptr_t>(mapping);
  }

  std::int64_t heap_bytes_, heap_begin_, bytes_;
  std::vector<void*> mappings_;
  std::vector<std::byte*> heaps_;
};

}  // namespace pycomm::test

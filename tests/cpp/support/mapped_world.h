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
      : heap_bytes_(heap_bytes) {
    const std::int64_t staging = DeviceWorld::staging_bytes(n);
    const std::int64_t bytes = cuda::window_bytes(n, kLanes, staging, heap_bytes);
    int r = 0;
    for (cuda::Region& window : map_all(n, bytes)) {
      std::byte* const mine = reinterpret_cast<std::byte*>(window.here[r]);
      heaps_.push_back(mine + cuda::heap_begin(n, kLanes, staging));
      endpoints.push_back(std::make_unique<cuda::Endpoint>(cuda::EndpointOptions{
          0, r++, n, kLanes, staging, timeout, std::move(window), false, false, kLine, 0}));
    }
    first_heaps_ = heaps_;
  }
  ~MappedWorld() {
    endpoints.clear();
    for (const auto& [mapping, bytes] : mappings_) munmap(mapping, bytes);
  }
  MappedWorld(const MappedWorld&) = delete;
  MappedWorld& operator=(const MappedWorld&) = delete;

  // Adds to all heaps as much as they have; heap() is the added part from now on.
  void extend() {
    int r = 0;
    for (cuda::Region& region : map_all(static_cast<int>(heaps_.size()), heap_bytes_)) {
      heaps_[r] = reinterpret_cast<std::byte*>(region.here[r]);
      endpoints[r++]->extend(std::move(region));
    }
  }

  // Rank r's heap, where rank r sees it.
  std::byte* heap(int r) const { return heaps_[static_cast<std::size_t>(r)]; }
  std::byte* first_heap(int r) const { return first_heaps_[static_cast<std::size_t>(r)]; }

  std::int64_t heap_bytes() const { return heap_bytes_; }

  std::vector<std::unique_ptr<cuda::Endpoint>> endpoints;

 private:
  // New memory of every rank, mapped by every rank.
  std::vector<cuda::Region> map_all(int n, std::int64_t bytes) {
    std::vector<cuda::Region> regions(n, {bytes, {}, {}, 0});
    for (int owner = 0; owner < n; ++owner) {
      const int file = memfd_create("region", MFD_CLOEXEC);
      if (ftruncate(file, bytes) != 0) throw std::runtime_error("no memory for windows");
      for (cuda::Region& region : regions) region.here.push_back(map(file, bytes));
      close(file);
    }
    for (int r = 0; r < n; ++r) {
      for (const cuda::Region& region : regions) regions[r].there.push_back(region.here[r]);
    }
    for (cuda::Region& region : regions) region.multicast = device::make_multicast(region.here);
    return regions;
  }

  std::uintptr_t map(int file, std::int64_t bytes) {
    const auto size = static_cast<std::size_t>(bytes);
    void* const mapping = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) throw std::runtime_error("a window cannot be mapped");
    mappings_.emplace_back(mapping, size);
    return reinterpret_cast<std::uintptr_t>(mapping);
  }

  std::int64_t heap_bytes_;
  std::vector<std::pair<void*, std::size_t>> mappings_;
  std::vector<std::byte*> heaps_, first_heaps_;
};

}  // namespace pycomm::test

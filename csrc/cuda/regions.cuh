// Which memory of each rank other ranks reach, and where: the windows, and what was added to their heaps.
// Host code. Thread-safe: messages look here while the heap grows.
#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/operation.h"
#include "cuda/endpoint.h"
#include "cuda/launch.h"
#include "cuda/runtime.cuh"

namespace pycomm::cuda {

// A place counts the bytes of all regions, one after the other, so it is the same on every rank. Threads
// have one address space, and their places are addresses.
class Regions {
 public:
  // Tensors may use a window from `heap_begin` on.
  Regions(const EndpointOptions& options, std::int64_t heap_begin)
      : device_(options.device),
        rank_(static_cast<std::size_t>(options.rank)),
        ranks_(static_cast<std::size_t>(options.ranks)),
        one_address_space_(options.one_address_space) {
    Region window = options.window;
    if (one_address_space_) {
      window.there.assign(ranks_, 0);
      anywhere_ = upload({std::vector<std::uintptr_t>(ranks_, 0), window.there});
    }
    window_ = reinterpret_cast<std::byte*>(window.here[rank_]);
    add(std::move(window), heap_begin);
    windows_ = known_.front().table.get();
  }

  // From now on, tensors may lie there.
  void add(Region region, std::int64_t begin = 0) {
    PYCOMM_CHECK(region.here.size() == ranks_ && region.there.size() == ranks_,
                 "a region must have an address for every rank");
    // If this fails on some ranks only, the places of later regions are the same on all ranks.
    const std::int64_t first = std::exchange(bytes_, bytes_ + region.bytes);
    Table table = upload(region);
    const std::lock_guard lock(mutex_);
    known_.push_back({std::move(region), first, begin, std::move(table)});
  }

  // After the last kernel. Messages only need addresses.
  void free_tables() {
    const std::lock_guard lock(mutex_);
    anywhere_.reset();
    for (Known& known : known_) known.table.reset();
  }

  std::byte* window() const { return window_; }  // this rank's
  RegionTable windows() const { return windows_; }

  // The table of the region that has this memory of this rank, or null if others do not reach it.
  RegionTable table_of(const void* data, std::int64_t bytes) const {
    if (one_address_space_) return anywhere_.get();
    const std::lock_guard lock(mutex_);
    const Known* const found = find(data, bytes);
    return found == nullptr ? nullptr : found->table.get();
  }

  // The place of this rank's memory, or kNotInWindow if others do not reach it.
  std::int64_t place_of(const void* data, std::int64_t bytes) const {
    if (one_address_space_) return static_cast<std::int64_t>(number(data));
    const std::lock_guard lock(mutex_);
    const Known* const found = find(data, bytes);
    return found == nullptr ? kNotInWindow : found->first + offset_in(*found, data);
  }

  // The address of a rank's memory here. Trusts no place.
  void* address_of(std::size_t rank, std::int64_t place, std::int64_t bytes) const {
    if (one_address_space_) return reinterpret_cast<void*>(place);
    const std::lock_guard lock(mutex_);
    for (const Known& known : known_) {
      const std::int64_t offset = place - known.first;
      if (!known.holds(offset, bytes)) continue;
      return reinterpret_cast<void*>(known.region.here[rank] + static_cast<std::uintptr_t>(offset));
    }
    throw std::invalid_argument("the place is outside of the ranks' heaps");
  }

 private:
  struct Free {
    void operator()(std::byte** on_device) const { (void)cudaFree(on_device); }
  };
  using Table = std::unique_ptr<std::byte*, Free>;

  struct Known {
    Region region;
    std::int64_t first;  // the place of its first byte
    std::int64_t begin;  // the first byte for tensors
    Table table;

    bool holds(std::int64_t offset, std::int64_t bytes) const {
      return offset >= begin && offset <= region.bytes && bytes <= region.bytes - offset;
    }
  };

  static std::uintptr_t number(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

  std::int64_t offset_in(const Known& known, const void* data) const {
    return static_cast<std::int64_t>(number(data) - known.region.here[rank_]);
  }

  // With mutex_.
  const Known* find(const void* data, std::int64_t bytes) const {
    for (const Known& known : known_) {
      if (known.holds(offset_in(known, data), bytes)) return &known;
    }
    return nullptr;
  }

  // On a stream that waits for no other: operations of this rank may be waiting for other ranks.
  Table upload(const std::pair<std::vector<std::uintptr_t>, std::vector<std::uintptr_t>>& rows,
               std::uintptr_t multicast = 0) const {
    std::vector<std::uintptr_t> words = rows.first;
    words.insert(words.end(), rows.second.begin(), rows.second.end());
    words.push_back(multicast);
    const std::size_t bytes = words.size() * sizeof(std::uintptr_t);
    const DeviceGuard guard(device_);
    const BesideCaptures beside;
    void* on_device = nullptr;
    PYCOMM_CUDA_CHECK(cudaMalloc(&on_device, bytes));
    Table made(static_cast<std::byte**>(on_device));
    cudaStream_t stream = nullptr;
    PYCOMM_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaError_t error =
        cudaMemcpyAsync(on_device, words.data(), bytes, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    (void)cudaStreamDestroy(stream);
    PYCOMM_CUDA_CHECK(error);
    return made;
  }
  Table upload(const Region& region) const {
    return upload({region.here, region.there}, region.multicast);
  }

  const int device_;
  const std::size_t rank_, ranks_;
  const bool one_address_space_;
  std::byte* window_;
  RegionTable windows_;
  Table anywhere_;  // of threads' tensors
  mutable std::mutex mutex_;
  std::deque<Known> known_;  // first the windows
  std::int64_t bytes_ = 0;   // of all
};

}  // namespace pycomm::cuda

// A rank's part of the window's file that tensors lie in, and where it is mapped.
//
// A heap is as large as the node's memory, so that no tensor fails to fit, and mapped by piece: each
// allocation by itself, or small ones together, in the process that makes it; in others, as much of the heap's beginning as the
// tensors announced so far need. So address space goes with the memory in use, not with ranks times
// the node's memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/types.h"

namespace pycomm::cpu {

class Window;

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// A range of a file in this process's address space. Core dumps leave it out: they would fill every
// hole with zeros.
class Mapping {
 public:
  Mapping(int fd, std::int64_t begin, std::int64_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  std::int64_t bytes_;
};

// Where one rank's heap is mapped in this process. A offset is an offset in the rank's slice, which all
// ranks share. Thread-safe.
class HeapMap {
 public:
  // `begin`: where in the file offset 0 would be; `heap`: the offsets that there are.
  HeapMap(int fd, std::int64_t begin, const Range& heap) : fd_(fd), begin_(begin), heap_(heap) {}

  // Maps an allocation of this process's; it stays where it is until it is released.
  std::byte* map(const Range& offsets);
  void unmap(std::int64_t offset);
  // So many bytes at a offset, wherever they have been allocated.
  std::byte* at(std::int64_t offset, std::int64_t bytes);
  // The offset of a tensor if it lies in an allocation of this process's, else kNotInWindow.
  std::int64_t place_of(const void* data, std::int64_t bytes) const;

 private:
  // Small allocations share a mapping: a process may have some 65,000.
  struct Chunk {
    Mapping mapping;
    int users = 0;
  };
  struct Allocation {
    std::byte* data;
    std::int64_t bytes;
    std::optional<Mapping> own;  // or it lies in a chunk
  };
  Range chunk_at(std::int64_t offset) const;
  Allocation make(const Range& offsets);
  void add_view(std::int64_t needed);

  const int fd_;
  const std::int64_t begin_;
  const Range heap_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, Chunk> chunks_;                            // by first offset
  std::map<std::int64_t, Allocation> allocations_;                  // by offset
  std::map<std::uintptr_t, std::int64_t> places_;                   // of allocations, by address
  std::atomic<std::uintptr_t> lowest_ = UINTPTR_MAX, highest_ = 0;  // of all allocations so far
  std::vector<Mapping> views_;  // of the heap's beginning, each larger than the one before
};

// Gives out one rank's heap: first fit over free ranges.
class Heap {
 public:
  Heap(std::shared_ptr<Window> window, int rank);
  std::byte* allocate(std::int64_t bytes);
  void free(std::byte* data);

 private:
  std::shared_ptr<Window> window_;
  int rank_;
  const unsigned forks_;
  std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> free_;  // offset -> bytes
  std::map<std::byte*, Range> used_;
};

}  // namespace pycomm::cpu

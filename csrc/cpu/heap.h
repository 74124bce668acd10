// A rank's heap, which is the part of the window's file that tensors lie in, and its mappings.
//
// A heap is as large as the node's memory, so that every tensor fits, but it is mapped in pieces.
// The process that owns the heap maps each large allocation by itself and small ones together.
// Other processes map the beginning of the heap, as far as the tensors announced so far require. So
// the address space used grows with the memory in use, not with the number of ranks times the
// node's memory.
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

// A mapping of a range of a file. Core dumps leave it out, because they would fill every hole of
// the file with zeros.
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

// The mappings of one rank's heap in this process. An offset counts from the beginning of the
// rank's slice and is the same in all processes. Thread-safe.
class HeapMap {
 public:
  // `begin` is the position of offset 0 in the file; `heap` is the range of valid offsets.
  HeapMap(int fd, std::int64_t begin, const Range& heap) : fd_(fd), begin_(begin), heap_(heap) {}

  // Maps an allocation of this process. Its address stays valid until unmap().
  std::byte* map(const Range& offsets);
  void unmap(std::int64_t offset);
  // The address of `bytes` bytes at an offset, in an allocation of this process or of another one.
  std::byte* at(std::int64_t offset, std::int64_t bytes);
  // The offset of a tensor if it lies in an allocation of this process, else kNotInWindow.
  std::int64_t place_of(const void* data, std::int64_t bytes) const;

 private:
  // Small allocations share a mapping, because a process may have only some 65,000 mappings.
  struct Chunk {
    Mapping mapping;
    int users = 0;
  };
  struct Allocation {
    std::byte* data;
    std::int64_t bytes;
    std::optional<Mapping> own;  // empty if it lies in a chunk
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
  std::vector<Mapping> views_;  // of the heap's beginning, in ascending size
};

// Allocates memory in one rank's heap: first fit over free ranges.
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

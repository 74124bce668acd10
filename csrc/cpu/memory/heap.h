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
#include "cpu/memory/free_ranges.h"

namespace pycomm::cpu {

inline constexpr std::int64_t kPage = 4096;

class WindowFile;

// Names a window as long as it is in use: a word of the file that has this value until the last of
// its ranks has left it. The value is random, so the next user of the memory has another value.
struct Tenancy {
  std::int64_t position = 0;
  std::uint64_t id = 0;
};

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
  enum class Access { read, read_and_write };
  Mapping(int fd, std::int64_t begin, std::int64_t bytes, Access access = Access::read_and_write);
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
  ~HeapMap();
  HeapMap(const HeapMap&) = delete;
  HeapMap& operator=(const HeapMap&) = delete;

  // Maps an allocation of this process. Its address stays valid until unmap().
  std::byte* map(const Range& offsets);
  // Returns false if a page was detached: other processes may then still write to its place.
  bool unmap(std::int64_t offset);
  // The address of `bytes` bytes at an offset, in an allocation of this process or of another one.
  std::byte* at(std::int64_t offset, std::int64_t bytes);
  // Makes pages of an allocation of this process private to it, with the same content. Its tensors
  // then lie in no window.
  void detach(const Range& pages);
  // The number of calls of detach().
  std::uint32_t detachments() const { return detachments_.load(); }
  // The offset of a tensor if it lies in an allocation of this process, else kNotInWindow.
  std::int64_t place_of(const void* data, std::int64_t bytes) const;

 private:
  // Small allocations share a mapping, because a process may have only some 65,000 mappings.
  struct SharedMapping {
    Mapping mapping;
    int users = 0;
  };
  struct Allocation {
    std::byte* data;
    std::int64_t bytes;
    std::optional<Mapping> own;       // empty if it lies in a shared mapping
    std::vector<bool> detached = {};  // by page; empty if none is
  };
  Range shared_range(std::int64_t offset) const;
  Allocation make(const Range& offsets);
  void add_view(std::int64_t needed);
  void remap(std::byte* data, const Range& offsets, int flags);
  void make_private(std::byte* allocation, std::int64_t begin, const Range& within);

  const int fd_;
  const std::int64_t begin_;
  const Range heap_;
  mutable std::mutex mutex_;
  std::map<std::int64_t, SharedMapping> shared_;                    // by first offset
  std::map<std::int64_t, Allocation> allocations_;                  // by offset
  std::map<std::uintptr_t, std::int64_t> places_;                   // of allocations, by address
  std::atomic<std::uintptr_t> lowest_ = UINTPTR_MAX, highest_ = 0;  // of all allocations so far
  std::atomic<std::uint32_t> detachments_ = 0;
  std::vector<Mapping> views_;  // of the heap's beginning, in ascending size
};

// Allocates memory in the heap of one slice: first fit over free ranges. Thread-safe.
class Heap {
 public:
  Heap(WindowFile& file, int slice);
  std::byte* allocate(std::int64_t bytes);
  void free(std::byte* data);

  // Finds a place for a window in this heap, without memory, and returns its offset. The place is
  // kept until cancel(), or until the window's last rank has left it after keep().
  std::int64_t reserve(std::int64_t bytes);
  void cancel(std::int64_t offset);
  void keep(std::int64_t offset, const Tenancy& tenancy);
  // Memory that is freed when the last rank has left a window.
  std::byte* lease(std::int64_t bytes, const Tenancy& tenancy);
  // Frees what belonged to windows that are no longer in use.
  void sweep();

 private:
  // A place or an allocation that is kept as long as a window is in use.
  struct Lease {
    Tenancy tenancy;
    std::int64_t offset;
    std::byte* data;  // null for a place
  };
  std::unique_lock<std::mutex> lock_own();
  std::byte* take_and_map(std::int64_t bytes);
  void unmap_and_give(std::byte* data);
  Range take(std::int64_t bytes);
  void end(const Lease& lease);

  WindowFile& file_;
  const int slice_;
  const unsigned forks_;
  std::mutex mutex_;
  FreeRanges free_;  // whole pages
  std::map<std::byte*, Range> used_;
  std::map<std::int64_t, std::int64_t> places_;  // of windows: offset -> bytes
  std::vector<Lease> leases_;
};

}  // namespace pycomm::cpu

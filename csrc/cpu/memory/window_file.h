// The file behind the windows of one node's ranks: anonymous shared memory with a slice per rank.
//
//   | parts of all slices that precede the heaps | heap of slice 0 | heap of slice 1 | ...
//
// The first part is the window that the file was made for (cpu/memory/window.h). Heaps hold tensors, and
// windows for some of the ranks. Offsets count from the beginning of a slice as if its heap directly
// followed the rest of it, and are the same in all processes. The file has no name, so it disappears
// with the last process that maps it. It is as large as could ever be needed, but only reserved
// ranges take memory. So a lack of memory is an exception when a range is reserved, not a SIGBUS
// later.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <deque>
#include <memory>

#include "core/types.h"
#include "cpu/memory/heap.h"

namespace pycomm::cpu {

// Throws the error of a system call that has just failed.
[[noreturn]] void throw_errno(const char* call);
// Makes an anonymous file of this size, without memory, and returns its descriptor. /proc shows the
// name.
int make_window_file(std::int64_t bytes, const char* name = "pycomm");
// Reserves memory for a range of a file. Throws OutOfMemory; then a part may be reserved. A range may
// be reserved again.
void reserve_in_file(int fd, std::int64_t position, std::int64_t bytes);

class WindowFile : public std::enable_shared_from_this<WindowFile> {
 public:
  // Takes ownership of `fd`. `heap` is the range of valid offsets.
  WindowFile(int fd, int slices, const Range& heap);
  ~WindowFile();
  WindowFile(const WindowFile&) = delete;
  WindowFile& operator=(const WindowFile&) = delete;

  int fd() const { return fd_; }
  // Identifies the file, in all processes alike.
  std::uint32_t id() const { return id_; }
  int slices() const { return slices_; }
  const Range& heap_range() const { return heap_; }
  std::int64_t slice_bytes() const { return heap_.begin + heap_.count; }
  // The position in the file of an offset in slice s.
  std::int64_t position(int s, std::int64_t offset) const {
    return (slices_ - 1) * heap_.begin + s * heap_.count + offset;
  }
  // The allocator and the mappings of slice s's heap.
  Heap& heap(int s) { return heaps_[static_cast<std::size_t>(s)]; }
  HeapMap& map(int s) { return maps_[static_cast<std::size_t>(s)]; }
  const HeapMap& map(int s) const { return maps_[static_cast<std::size_t>(s)]; }

  // Reserves memory for whole pages of slice s's heap and maps them; release() gives them back. It
  // returns false if the pages must not be used again: some were detached, and another process may
  // still write there.
  std::byte* allocate(int s, const Range& pages);
  bool release(int s, const Range& pages);
  // Gives back the memory of a range, which may still be mapped.
  void punch(std::int64_t position, std::int64_t bytes) const;
  // Makes pages of one of this process's allocations inaccessible to other processes, for good:
  // they become private memory of this process, with the same content.
  void detach(int s, const Range& pages);

  // Locks slice s for as long as this process has the file open. (A process that executes another
  // program keeps its pid, but not the file.) Returns true if that worked.
  bool hold(int s) const;
  // True if another process has locked slice s.
  bool held(int s) const;

  // Writes a word that may have no memory yet.
  template <class Word>
  void write(std::int64_t position, Word word) const {
    write(position, &word, sizeof(word));
  }
  // True until the last rank has left the window.
  bool lasts(const Tenancy& tenancy) const;

 private:
  struct flock lock_of(int s) const;
  void write(std::int64_t position, const void* data, std::size_t bytes) const;

  const int fd_;
  const std::uint32_t id_;
  const int slices_;
  const Range heap_;
  std::deque<HeapMap> maps_;
  std::deque<Heap> heaps_;
};

}  // namespace pycomm::cpu

// The memory that the ranks of one node share: one anonymous file with a slice per rank.
//
//   | control page | packets | staging, even operations | staging, odd operations | heap ... |
//
// In the file, what comes before the heaps lies together, so that one mapping has it all; the heaps
// follow, and are mapped by piece (cpu/heap.h). The file has no name, so it is gone with the last
// process that maps it. It is as large as could ever be needed, but only what has been reserved takes
// memory: control and staging when it is made, heap when a tensor is allocated, so that a lack of
// memory is an exception there and no SIGBUS later.
//
// The file begins with a header, in rank 0's control page: every rank that maps it compares the
// header, and the file's size, with what it expects.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <optional>

#include "core/details.h"
#include "core/hash.h"
#include "core/layout.h"
#include "core/operation.h"
#include "core/signal.h"
#include "core/types.h"
#include "cpu/bell.h"
#include "cpu/heap.h"
#include "cpu/shared_wait.h"

namespace pycomm::cpu {

// Written by the rank that makes the window. New members come last: ranks of different builds read
// this part of each other's windows.
struct alignas(128) Header {
  std::uint64_t magic;
  std::uint64_t layout;
  std::int64_t ranks;
  std::int64_t slice_bytes;
  std::int64_t staging_bytes;
};
inline constexpr std::uint64_t kMagic = 0x77206d6d6f637970;  // "pycomm w"

// What a rank tells the others. All of it is zero at first.
struct Control {
  Header header;  // rank 0's serves the whole group
  // 128 bytes, because processors fetch lines in pairs.
  struct alignas(128) Flag {
    std::atomic<std::uint32_t> value;
  };
  Announcement announcements[2];
  alignas(128) Details details[2];  // of the operations announced, as far as they have a hash
  Flag flags[kChannels];
  alignas(128) std::atomic<std::uint64_t> waiting;  // for whom and what, while a wait is long
  Bell bell;                                        // wakes this rank from it
  alignas(128) std::atomic<std::uint32_t> asleep;   // so many ranks; rank 0's serves the node
  alignas(128) std::atomic<std::uint32_t> left;     // no operation will follow
  std::atomic<std::uint32_t> holds;                 // it locks its slice (Window::hold)
  alignas(128) std::atomic<std::uint32_t> beats;    // moves while it waits for another node
  alignas(128) std::atomic<std::uint64_t> abort;    // rank 0's serves the whole group
  // If the group spans nodes: what this one tells the others, and what all have decided_word on. Rank
  // 0's serve the node.
  std::atomic<std::uint64_t> last_word, decided_word;
  // Whether this rank may be reading or writing tensors in other ranks' heaps. Until it says that it
  // is not, no rank that fails gives its tensors back to their owner.
  alignas(128) std::atomic<std::uint32_t> in_peers_heaps;
  // The same of this rank's kernels, for tensors on devices: set before the first one is launched,
  // cleared when none can use them any more.
  alignas(128) std::atomic<std::uint32_t> kernels_in_peers_heaps;
  alignas(128) std::atomic<std::uint32_t> completed;  // the last operation that has succeeded here
  SharedWait shared_wait;  // what this rank has long waited for in another group
};

inline constexpr std::int64_t kPage = 4096;
inline constexpr std::int64_t kControlBytes = 4096;
// The largest tensor that travels in packets (core/algorithms/packet.h).
inline constexpr std::int64_t kPacketBytes = 64;
static_assert(sizeof(Control) <= kControlBytes);

// Stands for where everything lies in a window, so every member of Control is named. Raise the version
// when something changes its meaning but not its offset.
inline constexpr std::uint64_t kLayoutVersion = 3;
inline constexpr std::uint64_t kLayout = hash_of({kLayoutVersion,
                                                  sizeof(Header),
                                                  sizeof(Operation),
                                                  sizeof(Announcement),
                                                  sizeof(Details),
                                                  sizeof(Control),
                                                  offsetof(Control, header),
                                                  offsetof(Control, announcements),
                                                  offsetof(Control, details),
                                                  offsetof(Control, flags),
                                                  offsetof(Control, waiting),
                                                  offsetof(Control, bell),
                                                  offsetof(Control, asleep),
                                                  offsetof(Control, left),
                                                  offsetof(Control, holds),
                                                  offsetof(Control, beats),
                                                  offsetof(Control, abort),
                                                  offsetof(Control, last_word),
                                                  offsetof(Control, decided_word),
                                                  offsetof(Control, in_peers_heaps),
                                                  offsetof(Control, kernels_in_peers_heaps),
                                                  offsetof(Control, completed),
                                                  offsetof(Control, shared_wait),
                                                  kChannels,
                                                  kStagingSlots,
                                                  kLine,
                                                  kControlBytes,
                                                  kPacketBytes});
static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);

// Of one rank: two parities, all peers, twice the data.
constexpr std::int64_t packet_area_bytes(int ranks) {
  return round_up(std::int64_t{2} * ranks * 2 * kPacketBytes, kPage);
}
// How much of a rank's slice comes before its heap.
constexpr std::int64_t heap_begin(int ranks, std::int64_t staging_bytes) {
  return kControlBytes + packet_area_bytes(ranks) + round_up(staging_bytes, kPage);
}

class Window {
 public:
  // A new shared file for `ranks` ranks; returns its descriptor. `staging_bytes` is per rank.
  static int create(int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes);

  // Maps the file, if it is what create() makes when called with the same; owns `fd` from then on.
  Window(int fd, int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Maps the pages of rank r's slice before their first use. All slices of many ranks would take
  // longer than the rest of making a group.
  void populate(int r);

  Control& control(int r) const { return *reinterpret_cast<Control*>(slice(r)); }
  // Staging of rank r for operations of this parity.
  std::byte* staging(int r, std::uint32_t parity) const {
    return slice(r) + staging_begin() + (parity & 1u) * half_bytes_;
  }
  // Where rank `from` puts packets for rank r in operations of this parity.
  std::atomic<std::uint64_t>* packets(int r, std::uint32_t parity, int from) const {
    const std::int64_t offset = ((parity & 1u) * ranks_ + from) * 2 * kPacketBytes;
    return reinterpret_cast<std::atomic<std::uint64_t>*>(slice(r) + kControlBytes + offset);
  }
  // The same in all processes, and no other window's.
  std::uint32_t id() const { return id_; }
  std::int64_t half_bytes() const { return half_bytes_; }
  std::int64_t slice_bytes() const { return slice_bytes_; }
  std::int64_t heap_begin() const { return heap_begin_; }

  // Takes memory for whole pages of rank r's heap and maps them, or gives them back.
  std::byte* allocate(int r, const Range& pages);
  void release(int r, const Range& pages);
  // Takes pages of an allocation of this process's out of the reach of others, once: what they hold
  // stays, and from then on they are this process's own memory.
  void detach(int r, const Range& pages);
  // So many bytes at a offset in rank r's heap.
  std::byte* in_heap(int r, std::int64_t offset, std::int64_t bytes) {
    return heap(r).at(offset, bytes);
  }
  // Where in rank r's heap a tensor of this process's lies, or kNotInWindow.
  std::int64_t place_in_heap(int r, const void* data, std::int64_t bytes) const {
    return heaps_[static_cast<std::size_t>(r)].place_of(data, bytes);
  }

  // Locks rank r's slice for as long as this process has the file: a process that becomes another
  // program (exec) keeps its number, but not the file. Returns whether that worked.
  bool hold(int r) const;
  // Whether another process has locked rank r's slice.
  bool held(int r) const;

 private:
  struct flock lock_of(int r) const;
  std::byte* slice(int r) const { return fixed_->data() + r * heap_begin_; }
  HeapMap& heap(int r) { return heaps_[static_cast<std::size_t>(r)]; }
  // Where in the file rank r's slice would begin if its heap were there in one piece.
  std::int64_t begin_in_file(int r) const {
    return (ranks_ - 1) * heap_begin_ + r * (slice_bytes_ - heap_begin_);
  }
  std::int64_t staging_begin() const { return kControlBytes + packet_area_bytes(ranks_); }

  const int fd_;
  const std::uint32_t id_;
  const int ranks_;
  const std::int64_t slice_bytes_;
  const std::int64_t half_bytes_;
  const std::int64_t heap_begin_;
  std::optional<Mapping> fixed_;  // all that comes before the heaps
  std::deque<HeapMap> heaps_;
};

}  // namespace pycomm::cpu

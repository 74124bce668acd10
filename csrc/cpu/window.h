// The window: memory that the ranks of one node share, an anonymous file with a slice per rank.
//
//   | control page | packets | mailboxes | staging, even operations | staging, odd ones | heap ... |
//
// In the file, the parts of all slices that precede the heaps come first, so that a single mapping
// has them all. The heaps follow and are mapped in pieces (cpu/heap.h). The file has no name, so it
// disappears with the last process that maps it. It is as large as could ever be needed, but only
// reserved parts take memory: control pages and staging when the file is made, heap when a tensor
// is allocated. So a lack of memory is an exception at that point, not a SIGBUS later.
//
// The file begins with a header, in rank 0's control page. Every rank that maps the file compares
// the header and the file's size with what it expects.
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
#include "cpu/p2p/mailbox.h"
#include "cpu/shared_wait.h"

namespace pycomm::cpu {

// Written by the rank that creates the window. Add new members at the end: ranks of different
// builds read this part of each other's windows.
struct alignas(128) Header {
  std::uint64_t magic;
  std::uint64_t layout;
  std::int64_t ranks;
  std::int64_t slice_bytes;
  std::int64_t staging_bytes;
};
inline constexpr std::uint64_t kMagic = 0x77206d6d6f637970;  // "pycomm w"

// What a rank shows to the others. Zero-initialised.
struct Control {
  Header header;  // only rank 0's is used
  // 128 bytes, because processors fetch cache lines in pairs.
  struct alignas(128) Flag {
    std::atomic<std::uint32_t> value;
  };
  Announcement announcements[2];
  alignas(128) Details details[2];  // of announced operations that have a hash of details
  Flag flags[kChannels];
  alignas(128) std::atomic<std::uint64_t> waiting;  // what a long wait is for
  Bell bell;                                        // wakes this rank from that wait
  alignas(128) std::atomic<std::uint32_t> asleep;   // number of ranks asleep; only rank 0's is used
  alignas(128) std::atomic<std::uint32_t> left;     // this rank starts no more operations
  std::atomic<std::uint32_t> holds;                 // this rank locks its slice (Window::hold)
  alignas(128) std::atomic<std::uint32_t> beats;    // changes while it waits for another node
  alignas(128) std::atomic<std::uint64_t> abort;    // only rank 0's is used
  // If the group spans nodes: this node's word to the others, and the word that all nodes have
  // decided on. Only rank 0's are used.
  std::atomic<std::uint64_t> last_word, decided_word;
  // Set while this rank may access tensors in other ranks' heaps. A rank that fails gives its
  // tensors back to their owners only when all flags are clear.
  alignas(128) std::atomic<std::uint32_t> in_peers_heaps;
  // The same for this rank's kernels and tensors on devices: set before the first kernel is
  // launched, cleared when no kernel can access them any more.
  alignas(128) std::atomic<std::uint32_t> kernels_in_peers_heaps;
  alignas(128) std::atomic<std::uint32_t> completed;  // last operation that succeeded here
  SharedWait shared_wait;                             // a long wait of this rank in another group
  // Point-to-point operations. This rank's threads sleep on a bell of their own.
  alignas(128) std::atomic<std::uint32_t> p2p_asleep;  // number of threads asleep
  std::atomic<std::uint32_t> p2p_waiting;              // 1 + the rank that this one waits for
  alignas(128) Bell p2p_bell;                          // wakes them
  p2p::Disagreement disagreement;                      // why this rank has aborted the group
  alignas(128) std::atomic<std::uint32_t> p2p_in_peers_heaps;  // as in_peers_heaps
};

inline constexpr std::int64_t kPage = 4096;
inline constexpr std::int64_t kControlBytes = 4096;
// The largest tensor that travels in packets (core/algorithms/packet.h).
inline constexpr std::int64_t kPacketBytes = 64;
static_assert(sizeof(Control) <= kControlBytes);

// A hash of the window's layout, so every member of Control is listed. Raise the version when
// something changes its meaning but not its offset.
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
                                                  offsetof(Control, p2p_asleep),
                                                  offsetof(Control, p2p_waiting),
                                                  offsetof(Control, p2p_bell),
                                                  offsetof(Control, disagreement),
                                                  offsetof(Control, p2p_in_peers_heaps),
                                                  sizeof(p2p::Mailbox),
                                                  offsetof(p2p::Mailbox, sender),
                                                  offsetof(p2p::Mailbox, receiver),
                                                  sizeof(p2p::Disagreement),
                                                  p2p::kRingBytes,
                                                  p2p::kAnswers,
                                                  kChannels,
                                                  kStagingSlots,
                                                  kLine,
                                                  kControlBytes,
                                                  kPacketBytes});
static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);

// The bytes of one rank's packet area: two parities, all peers, and two bytes for each byte of
// data.
constexpr std::int64_t packet_area_bytes(int ranks) {
  return round_up(std::int64_t{2} * ranks * 2 * kPacketBytes, kPage);
}
// The bytes of one rank's mailboxes: one for each rank that may send to it.
constexpr std::int64_t mailbox_area_bytes(int ranks) {
  return round_up(ranks * static_cast<std::int64_t>(sizeof(p2p::Mailbox)), kPage);
}
// The bytes of a rank's slice that precede its heap.
constexpr std::int64_t heap_begin(int ranks, std::int64_t staging_bytes) {
  return kControlBytes + packet_area_bytes(ranks) + mailbox_area_bytes(ranks) +
         round_up(staging_bytes, kPage);
}

class Window {
 public:
  // Creates a shared file for `ranks` ranks and returns its descriptor. `staging_bytes` is per
  // rank.
  static int create(int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes);

  // Maps the file. Throws unless create() made it with the same arguments. Takes ownership of `fd`.
  Window(int fd, int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Maps the pages of rank r's slice before their first use. Each rank does it only for its own
  // slice: with many ranks, all slices would take longer than the rest of creating a group.
  void populate(int r);

  Control& control(int r) const { return *reinterpret_cast<Control*>(slice(r)); }
  // Rank r's staging area for operations of this parity.
  std::byte* staging(int r, std::uint32_t parity) const {
    return slice(r) + staging_begin() + (parity & 1u) * half_bytes_;
  }
  // Where rank `from` writes packets for rank r in operations of this parity.
  std::atomic<std::uint64_t>* packets(int r, std::uint32_t parity, int from) const {
    const std::int64_t offset = ((parity & 1u) * ranks_ + from) * 2 * kPacketBytes;
    return reinterpret_cast<std::atomic<std::uint64_t>*>(slice(r) + kControlBytes + offset);
  }
  // For messages of rank `from` to rank r.
  p2p::Mailbox& mailbox(int r, int from) const {
    std::byte* const area = slice(r) + kControlBytes + packet_area_bytes(ranks_);
    return reinterpret_cast<p2p::Mailbox*>(area)[from];
  }
  // Identifies the window, in all processes alike.
  std::uint32_t id() const { return id_; }
  std::int64_t half_bytes() const { return half_bytes_; }
  std::int64_t slice_bytes() const { return slice_bytes_; }
  std::int64_t heap_begin() const { return heap_begin_; }

  // Reserves memory for whole pages of rank r's heap and maps them; release() gives them back.
  std::byte* allocate(int r, const Range& pages);
  void release(int r, const Range& pages);
  // Makes pages of one of this process's allocations inaccessible to other processes, for good:
  // they become private memory of this process, with the same content.
  void detach(int r, const Range& pages);
  // The address of `bytes` bytes at an offset in rank r's heap.
  std::byte* in_heap(int r, std::int64_t offset, std::int64_t bytes) {
    return heap(r).at(offset, bytes);
  }
  // The offset in rank r's heap of a tensor in an allocation of this process, or kNotInWindow.
  std::int64_t place_in_heap(int r, const void* data, std::int64_t bytes) const {
    return heaps_[static_cast<std::size_t>(r)].place_of(data, bytes);
  }

  // Locks rank r's slice for as long as this process has the file open. (A process that executes
  // another program keeps its pid, but not the file.) Returns true if that worked.
  bool hold(int r) const;
  // True if another process has locked rank r's slice.
  bool held(int r) const;

 private:
  struct flock lock_of(int r) const;
  std::byte* slice(int r) const { return fixed_->data() + r * heap_begin_; }
  HeapMap& heap(int r) { return heaps_[static_cast<std::size_t>(r)]; }
  // The position in the file at which rank r's slice would begin if its heap directly followed the
  // rest of it.
  std::int64_t begin_in_file(int r) const {
    return (ranks_ - 1) * heap_begin_ + r * (slice_bytes_ - heap_begin_);
  }
  std::int64_t staging_begin() const {
    return kControlBytes + packet_area_bytes(ranks_) + mailbox_area_bytes(ranks_);
  }

  const int fd_;
  const std::uint32_t id_;
  const int ranks_;
  const std::int64_t slice_bytes_;
  const std::int64_t half_bytes_;
  const std::int64_t heap_begin_;
  std::optional<Mapping> fixed_;  // everything before the heaps
  std::deque<HeapMap> heaps_;
};

}  // namespace pycomm::cpu

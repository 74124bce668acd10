// The window: memory that the ranks of one group on one node share, with a slice per rank.
//
//   | control page | packets | mailboxes | records | launches | staging, even operations |
//   | staging, odd ones | subjects |
//
// The slices lie in a file (cpu/memory/window_file.h) one after another, so that a single mapping has them
// all. The first window of a file precedes the heaps, and begins with a header, in rank 0's control
// page: every rank that maps the file compares the header and the file's size with what it expects.
// All its memory is reserved when the file is made. A window for some of the file's ranks lies in
// the heap of one of them. Its ranks need not meet: each reserves the control pages of all when it
// joins, and as much of its own staging as its operations use, and its subjects if it has any. It has
// a header, too, by which onlookers find it (cpu/observe/window_reader.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <vector>

#include "core/details.h"
#include "core/hash.h"
#include "core/layout.h"
#include "core/operation.h"
#include "core/record.h"
#include "core/signal.h"
#include "core/types.h"
#include "cpu/executor/bell.h"
#include "cpu/faults/shared_wait.h"
#include "cpu/memory/heap.h"
#include "cpu/memory/window_file.h"
#include "cpu/observe/record.h"
#include "cpu/observe/subject.h"
#include "cpu/p2p/mailbox.h"

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

// The process and the number, in its whole group, of a rank.
constexpr std::uint64_t identity_word(int pid, int number) {
  return static_cast<std::uint64_t>(pid) << 32 | static_cast<std::uint32_t>(number);
}

// What a rank shows to the others. Zero-initialised.
struct Control {
  Header header;                        // only rank 0's is used
  std::atomic<std::uint64_t> identity;  // identity_word() of a rank that has joined
  // 128 bytes, because processors fetch cache lines in pairs.
  struct alignas(128) Flag {
    std::atomic<std::uint32_t> value;
  };
  Announcement announcements[2];
  alignas(128) Details details[2];  // of announced operations that have a hash of them, or a label
  Flag flags[kChannels];
  alignas(128) std::atomic<std::uint64_t> waiting;  // what a long wait is for
  Bell bell;                                        // wakes this rank from that wait
  alignas(128) std::atomic<std::uint32_t> asleep;   // number of ranks asleep; only rank 0's is used
  alignas(128) std::atomic<std::uint32_t> left;     // this rank starts no more operations
  std::atomic<std::uint32_t> holds;                 // this rank locks its slice (Window::hold)
  std::atomic<std::uint32_t> subjects;              // the number of its last subject; 0: none
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
  std::atomic<std::int64_t> own, blocked;  // ticks between waits for operations, and in them
  SharedWait shared_wait;                  // a long wait of this rank in another group
  // Point-to-point operations. This rank's threads sleep on a bell of their own.
  alignas(128) std::atomic<std::uint32_t> p2p_asleep;  // number of threads asleep
  std::atomic<std::uint64_t> p2p_waiting;              // message_wait_word() of a long wait
  alignas(128) Bell p2p_bell;                          // wakes them
  p2p::Disagreement disagreement;                      // why this rank has aborted the group
  alignas(128) std::atomic<std::uint32_t> p2p_in_peers_heaps;  // as in_peers_heaps
  // If the window lies in a heap: its id, until the last of its ranks has left it; and the number of
  // ranks that have. Only rank 0's are used.
  alignas(128) std::atomic<std::uint64_t> tenant;
  std::atomic<std::uint32_t> departed;
  // Outcomes of decisions (NodeRanks::settle). A rank may be one decision ahead. Only rank 0's are used.
  alignas(128) std::atomic<std::uint64_t> outcomes[2];
  // How survivors agree on a smaller group (cpu/faults/shrink.h).
  alignas(128) std::atomic<std::uint32_t> shrinking;  // what this rank has said
  std::atomic<std::uint32_t> decision;  // 1 + the rank whose proposal holds; only rank 0's is used
  struct Proposal {
    std::int64_t offset;  // of a window in this rank's heap
    std::uint64_t id;
    std::uint64_t members[16];  // a bit for each rank of this window
  } proposal;
  // A DeviceProgress, and the ticks at which this rank's host has seen each word first.
  alignas(128) std::atomic<std::uint64_t> progress[2];
  std::atomic<std::int64_t> progress_seen[2];
  alignas(128) std::atomic<std::int64_t> memory[std::tuple_size_v<MemoryFigures>];
};

inline constexpr std::int64_t kControlBytes = 4096;
// The largest tensor that travels in packets (core/algorithms/packet.h).
inline constexpr std::int64_t kPacketBytes = 64;
static_assert(sizeof(Control) <= kControlBytes);

// A hash of the window's layout, so every member of Control is listed. Raise the version when
// something changes its meaning but not its offset.
inline constexpr std::uint64_t kLayoutVersion = 8;
inline constexpr std::uint64_t kLayout = hash_of({kLayoutVersion,
                                                  sizeof(Header),
                                                  sizeof(Operation),
                                                  sizeof(Announcement),
                                                  sizeof(Details),
                                                  sizeof(Control),
                                                  offsetof(Control, header),
                                                  offsetof(Control, identity),
                                                  offsetof(Control, announcements),
                                                  offsetof(Control, details),
                                                  offsetof(Control, flags),
                                                  offsetof(Control, waiting),
                                                  offsetof(Control, bell),
                                                  offsetof(Control, asleep),
                                                  offsetof(Control, left),
                                                  offsetof(Control, holds),
                                                  offsetof(Control, subjects),
                                                  offsetof(Control, beats),
                                                  offsetof(Control, abort),
                                                  offsetof(Control, last_word),
                                                  offsetof(Control, decided_word),
                                                  offsetof(Control, in_peers_heaps),
                                                  offsetof(Control, kernels_in_peers_heaps),
                                                  offsetof(Control, completed),
                                                  offsetof(Control, own),
                                                  offsetof(Control, blocked),
                                                  offsetof(Control, shared_wait),
                                                  offsetof(Control, p2p_asleep),
                                                  offsetof(Control, p2p_waiting),
                                                  offsetof(Control, p2p_bell),
                                                  offsetof(Control, disagreement),
                                                  offsetof(Control, p2p_in_peers_heaps),
                                                  offsetof(Control, tenant),
                                                  offsetof(Control, departed),
                                                  offsetof(Control, outcomes),
                                                  offsetof(Control, shrinking),
                                                  offsetof(Control, decision),
                                                  offsetof(Control, proposal),
                                                  sizeof(Control::Proposal),
                                                  offsetof(Control, progress),
                                                  offsetof(Control, progress_seen),
                                                  offsetof(Control, memory),
                                                  sizeof(p2p::Mailbox),
                                                  offsetof(p2p::Mailbox, sender),
                                                  offsetof(p2p::Mailbox, receiver),
                                                  sizeof(p2p::Disagreement),
                                                  sizeof(Record),
                                                  kRecords,
                                                  sizeof(Subject),
                                                  kSubjects,
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
inline constexpr std::int64_t kRecordBytes = kRecords * sizeof(Record);  // of a ring
static_assert(kRecordBytes % kPage == 0);
inline constexpr std::int64_t kSubjectBytes = kSubjects * sizeof(Subject);
static_assert(kSubjectBytes % kPage == 0);
// Where staging begins in a slice.
constexpr std::int64_t staging_begin(int ranks) {
  return kControlBytes + packet_area_bytes(ranks) + mailbox_area_bytes(ranks) + 2 * kRecordBytes;
}
// The bytes of a rank's slice.
constexpr std::int64_t window_slice_bytes(int ranks, std::int64_t staging_bytes) {
  return staging_begin(ranks) + round_up(staging_bytes, kPage) + kSubjectBytes;
}

inline Record* records_of(std::byte* slice, int ranks) {
  return reinterpret_cast<Record*>(slice + staging_begin(ranks) - 2 * kRecordBytes);
}
inline Record* launches_of(std::byte* slice, int ranks) {
  return records_of(slice, ranks) + kRecords;
}
inline Subject* subjects_of(std::byte* slice, std::int64_t slice_bytes) {
  return reinterpret_cast<Subject*>(slice + slice_bytes - kSubjectBytes);
}

class Window {
 public:
  // Creates a shared file for `ranks` ranks and returns its descriptor. `staging_bytes` is per
  // rank.
  static int create(int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes);

  // Maps the file. Throws unless create() made it with the same arguments. Takes ownership of `fd`.
  Window(int fd, int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes);

  // Where a window for some ranks of another window lies: in the heap of one of the other window's
  // ranks.
  struct Place {
    int owner;
    std::int64_t offset;
    std::uint64_t id;
  };
  // Finds a place in rank `owner`'s heap, which is this process's. The ranks `departed` of the
  // `ranks` ranks will never map the window. cancel() takes back a place that no rank has mapped.
  Place reserve(int owner, int ranks, const std::vector<int>& departed) const;
  void cancel(const Place& place) const;
  // The place of a window that rank `owner`, perhaps another process, has reserved.
  Place place(int owner, std::int64_t offset, std::uint64_t id) const {
    return {seat(owner), offset, id};
  }
  // Says in the window at `place`, for `ranks` ranks, that its rank r takes part in no operation.
  void leave_at(const Place& place, int ranks, int r) const;
  // Maps a window for the ranks `members` of another one; this process is `members[rank]`.
  Window(const Window& whole, std::vector<int> members, int rank, const Place& place);

  ~Window() { depart(); }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Maps the pages of rank r's slice before their first use. Each rank does it only for its own
  // slice: with many ranks, all slices would take longer than the rest of creating a group.
  void populate(int r);
  // Reserves memory for the first bytes of the slots in rank r's staging, which is this process's.
  void need_staging(int r, std::int64_t bytes) {
    if (std::min(bytes, slot_bytes_) > staged_) reserve_staging(r, bytes);
  }
  // Says that this rank does not use the window any more. The last rank to leave a window in a heap
  // gives its memory back. Idempotent.
  void depart();
  // Says the same for `ranks` ranks that have ended without saying it.
  void depart_for(std::uint32_t ranks) const {
    if (in_heap()) control(0).departed.fetch_add(ranks);
  }

  // Says that rank r, which is this process's, takes part in no operation.
  void leave(int r) const { control(r).left.store(1, std::memory_order_release); }

  Control& control(int r) const { return *reinterpret_cast<Control*>(slice(r)); }
  // Rank r's staging area for operations of this parity.
  std::byte* staging(int r, std::uint32_t parity) const {
    return slice(r) + staging_begin(ranks_) + (parity & 1u) * half_bytes_;
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
  // The records of rank r's last operations; the one of an operation lies at its number modulo
  // kRecords.
  Record* records(int r) const { return records_of(slice(r), ranks_); }
  // The records of rank r's launches on its device, in the same order.
  Record* launches(int r) const { return launches_of(slice(r), ranks_); }
  // The subjects of rank r's operations, each at its number modulo kSubjects. They may have no memory
  // before the first one.
  Subject* subjects(int r) const { return subjects_of(slice(r), stride_); }
  // Adds a subject to those of rank r, which is this process's, and returns its number.
  std::uint32_t add_subject(int r, std::string_view text);
  // Identifies the window, in all processes alike.
  std::uint32_t id() const { return id_; }
  // Bytes of a staging slot: each half has kStagingSlots.
  std::int64_t slot_bytes() const { return slot_bytes_; }
  // The valid offsets in a heap are those from heap_begin() to slice_bytes().
  std::int64_t slice_bytes() const { return file_->slice_bytes(); }
  std::int64_t heap_begin() const { return file_->heap_range().begin; }

  // The allocator of rank r's heap. It keeps the file, not the window.
  std::shared_ptr<Heap> heap(int r) const { return {file_, &file_->heap(seat(r))}; }
  // Memory in rank r's heap that is freed when all ranks have left the window.
  std::byte* allocate_for_good(int r, std::int64_t bytes) const;
  // As WindowFile's, for rank r's slice.
  void detach(int r, const Range& pages) const { file_->detach(seat(r), pages); }
  bool hold(int r) const { return file_->hold(seat(r)); }
  bool held(int r) const { return file_->held(seat(r)); }
  // The address of `bytes` bytes at an offset in rank r's heap.
  std::byte* in_heap(int r, std::int64_t offset, std::int64_t bytes) const {
    return file_->map(seat(r)).at(offset, bytes);
  }
  // Grows when pages of this process's tensors in rank r's heap are taken from other processes.
  std::uint32_t detachments(int r) const { return file_->map(seat(r)).detachments(); }
  // The offset in rank r's heap of a tensor in an allocation of this process, or kNotInWindow.
  std::int64_t place_in_heap(int r, const void* data, std::int64_t bytes) const {
    return file_->map(seat(r)).place_of(data, bytes);
  }

 private:
  // The rank in the file's first window, whose slice and heap rank r uses.
  int seat(int r) const { return seats_[static_cast<std::size_t>(r)]; }
  bool in_heap() const { return tenancy_.id != 0; }
  std::byte* slice(int r) const { return slices_->data() + r * stride_; }
  void check(const Place& place) const;
  // The position in the file of a member of rank r's control page in a window for `ranks` ranks.
  std::int64_t control_position(const Place& place, int ranks, int r, std::size_t member) const;
  void reserve_staging(int r, std::int64_t bytes);
  void give_back();
  void punch_rings() const;

  const std::shared_ptr<WindowFile> file_;
  const std::vector<int> seats_;
  const int ranks_;
  const std::int64_t half_bytes_;
  const std::int64_t slot_bytes_ = half_bytes_ / kStagingSlots / kLine * kLine;
  const std::int64_t stride_;        // bytes of a slice
  const std::int64_t position_ = 0;  // in the file
  const std::uint32_t id_;
  const Tenancy tenancy_;  // id 0 for the first window of a file
  const int rank_ = -1;    // for a window in a heap: the rank of this process
  const unsigned forks_;
  std::int64_t staged_;  // bytes of every slot that have memory
  bool departed_;
  std::optional<Mapping> slices_;
};

}  // namespace pycomm::cpu

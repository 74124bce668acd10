// A rank's window in device-visible memory. Plain arithmetic, host and device.
//
//   | lane 0 | lane 1 | ... | packets | staging, even operations | staging, odd operations | heap |
//
// A lane is one block of threads on every rank: it works on its own part of the tensor, through its
// own flags and staging, and never waits for another lane. Unlike on the CPU, peers write flags and
// announcements into the window of the rank that waits, so that polling stays in local memory.
#pragma once

#include "core/codecs/feedback.h"
#include "core/layout.h"
#include "core/operation.h"
#include "core/signal.h"
#include "core/types.h"

namespace pycomm::cuda {

// Ranks that can share one device, and so one kernel launch.
inline constexpr int kMaxLocalRanks = 32;
inline constexpr int kThreads = 512;
// Ranks of one group on CUDA: a block keeps a table of pointers to all of them.
inline constexpr int kMaxRanks = 64;

// The largest tensor that travels in packets (core/algorithms/packet.h).
inline constexpr std::int64_t kPacketBytes = 16 << 10;

// What a lane remembers from operation to operation. In device memory, so that a replayed graph
// goes on counting where the last operation stopped.
struct LaneState {
  std::uint32_t failed;  // an earlier operation drained, so its signals are not what peers count on
  std::uint32_t sequence;
  std::uint32_t signalled[kChannels];
};

struct WindowLayout {
  int ranks;
  int lanes;
  std::int64_t staging_bytes;  // both parities

  PYCOMM_HD constexpr std::int64_t lane_bytes() const {
    return round_up(2 * ranks * static_cast<std::int64_t>(sizeof(Announcement)) +
                        kChannels * ranks * 4 + static_cast<std::int64_t>(sizeof(LaneState)),
                    128);
  }
  PYCOMM_HD constexpr std::int64_t announcement(int lane, std::uint32_t parity, int from) const {
    return lane * lane_bytes() +
           ((parity & 1u) * ranks + from) * static_cast<std::int64_t>(sizeof(Announcement));
  }
  PYCOMM_HD constexpr std::int64_t flag(int lane, int channel, int from) const {
    return announcement(lane, 1, ranks) + (channel * ranks + from) * 4;
  }
  PYCOMM_HD constexpr std::int64_t state(int lane) const { return flag(lane, kChannels, 0); }
  // All lanes share an area: packet i of a tensor is always the same one, whichever lane puts it.
  PYCOMM_HD constexpr std::int64_t packets(std::uint32_t parity, int from) const {
    return lanes * lane_bytes() + ((parity & 1u) * ranks + from) * 2 * kPacketBytes;
  }
  PYCOMM_HD constexpr std::int64_t half_bytes() const {
    return staging_bytes / 2 / (lanes * kStagingSlots * kLine) * (lanes * kStagingSlots * kLine);
  }
  PYCOMM_HD constexpr std::int64_t slot_bytes() const {
    return half_bytes() / lanes / kStagingSlots;
  }
  PYCOMM_HD constexpr std::int64_t staging(std::uint32_t parity, int lane,
                                           std::int64_t slot) const {
    return packets(1, ranks) + (parity & 1u) * half_bytes() +
           (lane * kStagingSlots + slot) * slot_bytes();
  }
  PYCOMM_HD constexpr std::int64_t heap_begin() const {
    return round_up(staging(1, lanes, 0), 4096);
  }
};

// One rank's part of a compressed operation.
struct Compression {
  Feedback feedback;
  std::uint32_t* nonfinite = nullptr;  // device memory, set to 1 where a value is not; or null
  std::byte* workspace = nullptr;      // top-k: device memory, used until the operation is complete
};

// How a kernel fails and learns that it must: pinned host memory that the host watches and writes.
struct Mailbox {
  std::uint64_t failure;   // by this rank's kernels: abort_word; the first one stays
  std::uint32_t sequence;  // of the operation that failed
  Operation first;         // what failed; of a disagreement: what rank 0 called, and the other one
  Operation other;
  std::uint64_t abort;              // by the host: abort_word of the group
  std::uint32_t gone[kMaxRanks];    // by the host: not zero once that rank has left or died
  std::uint32_t in_peers_heaps[1];  // by the kernels, one word per lane: not zero while it uses
                                    // other ranks' tensors where they lie
};

}  // namespace pycomm::cuda

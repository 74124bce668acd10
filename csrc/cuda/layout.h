// A rank's window in device-visible memory. Plain arithmetic, host and device.
//
//   | lane 0 | lane 1 | ... | packets | staging, even operations | staging, odd operations | heap |
//
// A lane is one block of threads on every rank: it works on its own part of the tensor, through its
// own flags and staging, and never waits for another lane. Unlike on the CPU, peers write flags and
// announcements into the window of the rank that waits, so that polling stays in local memory.
#pragma once

#include "core/layout.h"
#include "core/operation.h"
#include "core/optim/optimizer.h"
#include "core/signal.h"
#include "core/types.h"
#include "cuda/timing.h"

namespace pycomm::cuda {

// The most ranks that share one device, and so one kernel launch.
inline constexpr int kMaxLocalRanks = 32;
inline constexpr int kThreads = 512;
// The most ranks of a group on CUDA: a block keeps a table of pointers to all of them.
inline constexpr int kMaxRanks = 64;

// The largest tensor that travels in packets (cuda/packets.cuh).
inline constexpr std::int64_t kPacketBytes = 2 << 10;

// True for a plain all-reduce that travels in packets. A rank then works on one lane.
PYCOMM_HD constexpr bool fits_packets(const Operation& operation) {
  return operation.collective == Collective::all_reduce &&
         operation.algorithm == Algorithm::one_shot &&
         operation.count * size_of(operation.dtype) <= kPacketBytes;
}

// What a lane moves at most before another one works, too.
inline constexpr std::int64_t kLaneBytes = 16 << 10;

// A word of 64 bits that is aligned as one of 32.
struct Halves {
  std::uint32_t low, high;
};

// A lane's state between operations. It lies in device memory, so that a replayed graph goes on
// counting where the last operation stopped.
struct LaneState {
  // An earlier operation drained: its signal counts are not those that peers expect.
  std::uint32_t failed;
  std::uint32_t sequence;
  std::uint32_t signalled[kChannels];
  // The first lane's: how many operations it has told the host of (cuda/timing.h), and the times of one
  // that has more meetings to come, else zeros.
  std::uint32_t told;
  Halves begun, arrived;
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
  // The first lane's: the operation's packets, then the tensor's, eight bytes for each four bytes of data.
  PYCOMM_HD constexpr std::int64_t packets(std::uint32_t parity, int from) const {
    constexpr std::int64_t kArea =
        round_up(2 * (static_cast<std::int64_t>(sizeof(Operation)) + kPacketBytes), 128);
    return lanes * lane_bytes() + ((parity & 1u) * ranks + from) * kArea;
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

// One rank's part of a sharded step: its table in device memory (cuda/optim/shard_table.h), used until the
// step is complete.
struct Sharding {
  const std::uint64_t* table = nullptr;
  Rule rule{};
};

// A lane's part of a mailbox, in lines of its own: a GPU reads one place of the host's memory for one
// block after the other, and each read takes a microsecond.
struct alignas(128) LaneMail {
  std::uint64_t abort;           // written by the host: the group's abort word
  std::uint32_t in_peers_heaps;  // written by kernels: not zero while the lane uses other ranks'
                                 // tensors where they lie
};

// Pinned host memory through which a kernel reports failures and hears of aborts. The host polls and
// writes it.
struct Mailbox {
  std::uint64_t failure;  // written by this rank's kernels: an abort word; the first one stays
  std::uint32_t number;   // of the launch that failed
  Operation
      first;  // what failed; for a mismatch, rank 0's operation, and `other` the one that differs
  Operation other;
  // Written by kernels (core/signal.h): how far this rank's device is with what the host has launched,
  // and which operation of a graph it has replayed last.
  std::uint64_t progress[2];
  Timing timings[kTimings];       // written by kernels
  std::uint32_t gone[kMaxRanks];  // written by the host: not zero once that rank has left or died
  LaneMail lanes[1];              // as many as there are
};

}  // namespace pycomm::cuda

// The ranks of a node, as one of them sees them in the window: who they are, whether they live, and what
// they have agreed on.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "cpu/faults/liveness.h"
#include "cpu/memory/window.h"

namespace pycomm::cpu {

// What has become of a decision (cpu/faults/decision.h).
enum class Outcome : std::uint8_t { none, yes, no, failed };

class NodeRanks {
 public:
  NodeRanks(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
            int size)
      : window_(std::move(window)), peers_(std::move(peers)), rank_(rank), size_(size) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Liveness& peers() const { return *peers_; }
  // The number of rank r in the whole group, of which this node's ranks may be only a part.
  int number(int r) const { return peers_->number(r); }
  // The rank with this number in the whole group, or -1 if it is on another node.
  int index_of(int number) const;
  int pid(int r) const { return peers_->pid(r); }
  int pid_of(int number) const { return peers_->pid_of(number); }

  // True if rank r has left or its process has ended. Costs a system call.
  bool gone(int r) const { return left(r) || ended(r); }
  // The two parts of gone(), and whether the process has executed another program.
  bool left(int r) const { return window_->control(r).left.load(std::memory_order_acquire) != 0; }
  bool ended(int r) const { return peers_->ended(r) || replaced(r); }
  bool replaced(int r) const;

  // The abort word: not zero if the group has been aborted.
  std::uint64_t aborted() const { return window_->control(0).abort.load(); }
  // The outcome of the decision with this number, from 1. The first outcome that any rank gives holds.
  Outcome settle(std::uint64_t number, Outcome mine) const;

  // Tell the others that this rank's kernels may use tensors in other ranks' heaps, and that they
  // no longer do, after an abort or at the kernels' end. From any thread.
  void kernels_begin() { mine().kernels_in_peers_heaps.exchange(1); }
  void kernels_ended() { mine().kernels_in_peers_heaps.store(0, std::memory_order_release); }
  // After an abort: returns true when no live rank's kernels use other ranks' tensors, and false if
  // that takes longer than `patience`. From any thread; `interrupt` may throw.
  bool wait_for_kernels(Clock::duration patience, void (*interrupt)() = nullptr) const;

  // Shows the other ranks that this rank is waiting for another node, with a deadline of its own.
  void beat() { mine().beats.fetch_add(1, std::memory_order_relaxed); }
  // The ticks between waits for rank r's operations, and in them (Recorder::count_blocked).
  std::pair<std::int64_t, std::int64_t> own_and_blocked(int r) const {
    const Control& theirs = window_->control(r);
    return {theirs.own.load(std::memory_order_relaxed),
            theirs.blocked.load(std::memory_order_relaxed)};
  }

 protected:
  Control& mine() const { return window_->control(rank_); }
  // The sum over all ranks, because a rank that this one waits for may itself wait for another node.
  std::uint32_t beats() const;

  const std::shared_ptr<Window> window_;
  const std::shared_ptr<const Liveness> peers_;
  const int rank_;
  const int size_;
};

}  // namespace pycomm::cpu

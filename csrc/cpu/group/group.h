// One rank's part of a group: orders its operations, runs them on the caller's thread or on a
// worker, and refuses work after a failure.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/algorithms/select.h"
#include "core/call.h"
#include "cpu/codecs/coded_comm.h"
#include "cpu/codecs/topk_comm.h"
#include "cpu/executor/comm.h"
#include "cpu/faults/decision.h"
#include "cpu/faults/shrink.h"
#include "cpu/group/operation_lock.h"
#include "cpu/group/work.h"
#include "cpu/internode/group.h"
#include "cpu/memory/window.h"
#include "cpu/p2p/engine.h"

namespace pycomm::cpu {

class Group {
 public:
  Group(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank, int size,
        int cores, Clock::duration timeout, std::uint32_t first_epoch);
  ~Group();
  // Makes this one node's part of a group that spans nodes. Call it before the first operation.
  // `transport` connects this rank's stripe to the other nodes; null if this rank carries no
  // stripe. `port` is where other ranks reach this one with messages, and knows their addresses.
  // `algorithms` is the same on all ranks.
  void span(Nodes nodes, std::shared_ptr<Transport> transport, std::shared_ptr<p2p::Port> port,
            Clock::duration timeout, std::vector<AlgorithmRow> algorithms = {});
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Runs an operation after all that were submitted before; blocks. Buffers are raw host memory.
  // For a compressed operation, returns true if a value was not finite; the residual is then
  // unchanged.
  bool run(const Call& call, void (*interrupt)() = nullptr);
  bool run(const Operation& operation, const void* input, void* output,
           void (*interrupt)() = nullptr, const Feedback& feedback = {}) {
    return run({operation, input, output, feedback}, interrupt);
  }
  // True if this group can run the operation. If not, run() and submit() throw
  // std::invalid_argument that says why, before any rank begins.
  bool supports(const Call& call) const { return refusal(call).empty(); }
  // Only checks that all ranks call this operation, whose data moves elsewhere.
  void agree(const Operation& operation, void (*interrupt)() = nullptr);
  // Decides whether all ranks are ready for a step; the answer is the same on each rank. Throws on
  // all ranks if a rank has failed before the decision.
  bool should_commit(bool ready, void (*interrupt)() = nullptr);
  // Runs the calls one after another on the worker. The buffers must live until the work has
  // completed; then the worker calls `completion`.
  std::shared_ptr<Work> submit(std::vector<Call> calls, Completion completion = {});
  std::shared_ptr<Work> submit(const Operation& operation, const void* input, void* output,
                               const Feedback& feedback = {}) {
    return submit({{operation, input, output, feedback}});
  }

  // Point-to-point operations with another rank, or with this one; independent of the collectives.
  // recv() returns the source.
  void send(const void* data, const p2p::Envelope& envelope, const p2p::Options& options = {}) {
    p2p().send(data, envelope, options);
  }
  int recv(void* data, const p2p::Envelope& envelope, const p2p::Options& options = {}) {
    return p2p().recv(data, envelope, options);
  }
  // The buffer must live until the request has completed.
  p2p::RequestPtr isend(const void* data, const p2p::Envelope& envelope,
                        const p2p::Options& options = {}) {
    return p2p().isend(data, envelope, options);
  }
  p2p::RequestPtr irecv(void* data, const p2p::Envelope& envelope,
                        const p2p::Options& options = {}) {
    return p2p().irecv(data, envelope, options);
  }

  // As in p2p::Engine.
  void serve_device(std::shared_ptr<DeviceCopies> copies) { p2p().serve_device(std::move(copies)); }
  void send_on_device() { p2p().send_on_device(); }
  bool reaches(int device, int peer, std::int64_t bytes);

  // Throws if the group is unusable: the original error if no caller has received it yet, else
  // GroupUnusable.
  void check_usable();
  bool usable() const { return !forked() && !closed_ && !failed_ && comm_.aborted() == 0; }
  int pid(int r) const { return comm_.pid(r); }
  void set_name(std::string name) { comm_.set_name(std::move(name)); }
  // True if this rank runs no operation.
  bool idle() { return collectives_idle() && (forked() || p2p_idle()); }
  // True if this process is a fork of the one that created the group.
  bool forked() const;

  // Sets what the operations that this thread calls next are about, in words, for records and
  // errors; empty for nothing.
  void set_subject(const std::string& text);
  std::string subject();
  // Records that this rank launches an operation on its device; `captured`: in a graph. Returns its
  // number among the launches, from 1. One thread at a time may call this.
  std::uint32_t record_launch(const Operation& operation, bool captured);
  // Shows the others how far the device is.
  void show_progress(const DeviceProgress& progress);
  // Shows the others how much memory this rank's training takes; nothing once the group is closed.
  void show_memory(const MemoryFigures& figures);
  // Counts what the device has ended, on one thread at a time.
  void count_on_device(const TimedOperation& ended);
  // The error of a launch, with what it was about and what is known of all ranks.
  CollectiveError with_report(const CollectiveError& error, std::uint32_t launch);
  // Frees the buffers that operations leave to the next ones, once this rank runs no operation.
  // Until then, `interrupt` is called from time to time; it may throw.
  void trim(void (*interrupt)());
  // Stops all ranks of the group: they raise Aborted, which names this rank.
  void abort();
  // With abort(word) and abort_word(), another executor reports a reason to stop, and learns of
  // one.
  void abort(std::uint64_t word);
  // Reports a failure that was found elsewhere: the group refuses work from now on.
  void fail(const std::string& why);
  std::uint64_t abort_word() const { return comm_.aborted(); }
  bool gone(int r) const { return comm_.gone(r); }
  // As in Comm. In a forked process, kernels_ended() does nothing, because the kernels are the
  // parent's.
  void kernels_begin() { comm_.kernels_begin(); }
  void kernels_ended() {
    if (!forked()) comm_.kernels_ended();
  }
  // For ranks that are threads: says that this rank has failed elsewhere. Ranks that need it raise
  // PeerDied.
  void leave();
  // Says that this rank's function has returned. An operation of the others that this rank has
  // never begun cannot succeed. It ends as soon as no rank is in an earlier operation, which may
  // still succeed.
  void end_waits_of(std::span<const std::shared_ptr<Group>> others);
  // After a failure: the survivors, all of whom call this, agree on a smaller group
  // (cpu/faults/shrink.h). Aborts the group if it has not failed. Waits for no rank longer than
  // `patience`.
  Survivors shrink(Clock::duration patience, void (*interrupt)() = nullptr,
                   const std::vector<int>& excluded = {});
  // Waits for submitted work, then takes part in no further operation. Idempotent. `interrupt` is
  // called from time to time; if it throws, the work that close() waits for is aborted.
  void close(void (*interrupt)() = nullptr);

  // As in Comm, until close(); afterwards -1.
  int unresponsive();
  // The abort word for the ranks of other nodes; 0 if the group works or is closed.
  std::uint64_t ended_by();
  // Makes the next operation raise the group's failure again.
  void raise_again() { *told_ = false; }

  // What this node's ranks do, or only this one, and their last operations. From any thread, until
  // close().
  GroupState state(std::size_t most, bool only_own = false);
  // The times of this rank's operations and, for each rank of this node, the time in waits for
  // operations and the time between these waits. Times are ticks. From any thread, until close().
  struct Statistics {
    double seconds_per_tick;
    struct RankTimes {
      int rank;
      std::int64_t own, blocked;
    };
    std::vector<RankTimes> ranks;
    std::vector<CountedOperations> operations;
    std::vector<CountedOperations> on_device;
    MemoryFigures memory;  // this rank's
  };
  Statistics statistics();

  // In the whole group; Comm has the rank and size on this node.
  int rank() const { return rank_; }
  int size() const { return size_; }
  const Comm& comm() const { return comm_; }
  // cost(): what an operation would cost this rank between the ranks of its node; nothing is
  // counted in a group that spans nodes. link_cost(): between nodes, as link_traffic() tells
  // afterwards. `zero_copy`: all ranks' tensors lie in their windows.
  Traffic cost(const Operation& operation, bool zero_copy) const;
  // cost() and link_cost() by partner: the bytes sent to and received from each rank of the node, if
  // nothing is compressed, and from each node.
  std::vector<LinkTraffic> cost_by_rank(const Operation& operation, bool zero_copy) const;
  std::vector<LinkTraffic> link_cost_by_node(const Operation& operation) const;
  // The row of the group's table for uncompressed all-reduces of so many bytes; -1 if there is none.
  int matching_row(std::int64_t bytes) const;
  // For a caller whose bits must not depend on the table: what to ask for instead of `algorithm`.
  Algorithm in_rank_order(Algorithm algorithm) const {
    return algorithm == Algorithm::automatic && !algorithms_.empty() ? Algorithm::two_shot
                                                                     : algorithm;
  }
  LinkTraffic link_cost(const Operation& operation) const;
  LinkTraffic link_traffic() const {
    return internode_ == nullptr ? LinkTraffic{} : internode_->traffic();
  }
  const std::shared_ptr<Heap>& heap() const { return heap_; }
  // Zeroed memory in this rank's heap that is freed when all ranks have left the group.
  std::uintptr_t allocate_for_good(std::int64_t bytes) const {
    return reinterpret_cast<std::uintptr_t>(window_->allocate_for_good(comm_.rank(), bytes));
  }
  // Convert between addresses in a heap and offsets, which are the same on all ranks; kNotInWindow
  // if an address is not in this rank's heap.
  std::int64_t offset_of(std::uintptr_t data) const {
    return window_->place_in_heap(comm_.rank(), reinterpret_cast<const void*>(data), 1);
  }
  std::uintptr_t address(int r, std::int64_t offset, std::int64_t bytes) const {
    return reinterpret_cast<std::uintptr_t>(window_->in_heap(r, offset, bytes));
  }

 private:
  friend class Work;
  struct Task {
    std::span<const Call> calls;
    bool agree_only = false;
    std::vector<Call> owned = {};  // calls of a task that the caller does not wait for
    std::shared_ptr<Work> work = nullptr;
    Completion completion = {};
    std::int64_t enqueued = 0;  // tick
    std::uint32_t subject = 0;
  };

  bool collectives_idle();
  bool p2p_idle();
  bool p2p_awaits(int rank);
  p2p::Engine& p2p();
  p2p::Engine& engine();
  void close_p2p(void (*interrupt)());
  void depart();
  std::uint32_t subject_number() const {
    return has_subjects_.load(std::memory_order_relaxed) ? calling_subject()
                                                         : 0;  // nearly always 0
  }
  std::uint32_t calling_subject() const;
  std::string refusal(const Call& call) const;
  void check_fits(const Call& call) const;
  std::shared_ptr<Work> enqueue(Task task);
  bool run_in_order(const Task& task, void (*interrupt)());
  // Without `interrupt`, this does not wait.
  void wait_until_idle(void (*interrupt)());
  bool execute(const Task& task, void (*interrupt)(), std::int64_t* moved = nullptr);
  bool execute(const Call& call, bool agree_only, void (*interrupt)());
  void prepare_output_of(const Operation& operation, const Call& call);
  void retreat(const Call& call);
  void run_plain(const Operation& operation, const Call& call, bool agree_only,
                 void (*interrupt)());
  bool run_blocks(const Operation& operation, const Call& call, void (*interrupt)());
  bool run_topk(const Operation& operation, const Call& call, void (*interrupt)());
  std::int64_t bytes_moved() const;
  void serve();
  void fail(const CollectiveError& error);
  void fail(const std::string& why, std::exception_ptr error);
  // Throws the group's failure, for work that was submitted before it.
  void rethrow_failure();

  const int rank_;
  int size_;
  const unsigned forks_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<Heap> heap_;
  Comm comm_;
  std::unique_ptr<TopkWorkspace> topk_;        // created at the first use
  std::unique_ptr<InternodeGroup> internode_;  // if the group spans nodes
  std::vector<AlgorithmRow> algorithms_;       // likewise
  std::shared_ptr<p2p::Port> port_;
  OperationLock running_;
  Details all_details_;  // of the operation that runs, if it has more than its call says
  std::atomic<bool> shrunk_{false};
  std::atomic<bool> stops_shrinking_{false};  // set by abort() and close()
  std::uint64_t decisions_ = 0;

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<Task> queue_;
  std::atomic<int> pending_{0};
  std::atomic<bool> closed_{false};
  std::mutex departing_mutex_;
  // The numbers of the texts since the ring last began anew; by departing_mutex_.
  std::unordered_map<std::string, std::uint32_t> subjects_;
  std::uint32_t last_subject_ = 0;
  std::atomic<bool> has_subjects_{false};
  std::uint32_t last_launch_ = 0;
  Counters on_device_;
  bool departed_ = false;  // this rank does not use the window any more
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::string failure_;  // why
  std::exception_ptr error_;
  const std::shared_ptr<std::atomic<bool>> told_ = std::make_shared<std::atomic<bool>>(false);
  std::thread worker_;

  std::mutex closing_p2p_mutex_;
  std::mutex p2p_mutex_;
  std::unique_ptr<p2p::Engine> p2p_;  // created at the first use
};

}  // namespace pycomm::cpu

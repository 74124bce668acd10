// One rank's membership in a group: orders its operations, runs them on the caller's thread or on a
// worker, and refuses work once something has failed.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/call.h"
#include "cpu/codecs/coded_comm.h"
#include "cpu/codecs/topk_comm.h"
#include "cpu/comm.h"
#include "cpu/internode/group.h"
#include "cpu/operation_lock.h"
#include "cpu/window.h"
#include "cpu/work.h"

namespace pycomm::cpu {

class Group {
 public:
  Group(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank, int size,
        int cores, Clock::duration timeout, std::uint32_t first_epoch);
  ~Group();
  // Makes it one node's part of a group that spans nodes; before the first operation.
  // `transport`: to those who carry the same stripe on other nodes; null where this rank carries
  // none.
  void span(Nodes nodes, std::shared_ptr<Transport> transport, Clock::duration timeout);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Runs an operation after all that were submitted before; blocks. Buffers are raw host memory.
  // Of a compressed one, returns whether a value was not finite; the residual is then untouched.
  bool run(const Call& call, void (*interrupt)() = nullptr);
  bool run(const Operation& operation, const void* input, void* output,
           void (*interrupt)() = nullptr, const Feedback& feedback = {}) {
    return run({operation, input, output, feedback}, interrupt);
  }
  // Only meets the other ranks and checks that all mean this operation, whose data moves elsewhere.
  void agree(const Operation& operation, void (*interrupt)() = nullptr);
  // The same as run() on the worker, of one call after the other; the buffers must live until the
  // work has completed.
  std::shared_ptr<Work> submit(std::vector<Call> calls);
  std::shared_ptr<Work> submit(const Operation& operation, const void* input, void* output,
                               const Feedback& feedback = {}) {
    return submit({{operation, input, output, feedback}});
  }

  // Throws GroupUnusable if it is; what has made it so if no caller has been told yet.
  void check_usable();
  bool usable() const { return !forked() && !closed_ && !failed_ && comm_.aborted() == 0; }
  int pid(int r) const { return comm_.pid(r); }
  void set_name(std::string name) { comm_.set_name(std::move(name)); }
  // Whether no operation is under way here.
  bool idle();
  // Whether this process is a fork of the one that made the group.
  bool forked() const;

  // Gives back the memory that operations leave to the next ones, when none is under way here.
  // `interrupt` is called now and then until then, and may throw.
  void trim(void (*interrupt)());
  // Stops this and every other rank of the group: they raise Aborted, naming this rank.
  void abort();
  // An executor elsewhere has found a reason to stop, or wants to know of one.
  void abort(std::uint64_t word) { comm_.abort(word); }
  // A failure that was found elsewhere: the group refuses work from now on.
  void fail(const std::string& why);
  std::uint64_t abort_word() const { return comm_.aborted(); }
  bool gone(int r) const { return comm_.gone(r); }
  // As Comm's. The kernels of a forked process' parent are not its own.
  void kernels_begin() { comm_.kernels_begin(); }
  void kernels_ended() {
    if (!forked()) comm_.kernels_ended();
  }
  // For ranks that are threads. This rank has failed elsewhere: who needs it raises PeerDied.
  void leave();
  // The function of this rank has returned. An operation of the others that it has never begun cannot
  // succeed: it ends, as soon as no rank is in an earlier one, which may.
  void end_waits_of(std::span<const std::shared_ptr<Group>> others);
  // Waits for submitted work, then takes part in nothing more. Idempotent. `interrupt` is called now
  // and then; what it throws aborts what it waits for.
  void close(void (*interrupt)() = nullptr);

  // In the whole group; Comm's are those on this node.
  int rank() const { return rank_; }
  int size() const { return size_; }
  const Comm& comm() const { return comm_; }
  LinkTraffic link_traffic() const {
    return internode_ == nullptr ? LinkTraffic{} : internode_->traffic();
  }
  const std::shared_ptr<Heap>& heap() const { return heap_; }
  // Between addresses in this rank's heap and offsets, which all ranks share; kNotInWindow elsewhere.
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
    std::vector<Call> owned = {};  // of a task that the caller does not wait for
    std::shared_ptr<Work> work = nullptr;
  };

  void check_fits(const Operation& operation) const;
  std::shared_ptr<Work> enqueue(Task task);
  bool run_in_order(const Task& task, void (*interrupt)());
  // Without `interrupt` this does not wait.
  void wait_until_idle(void (*interrupt)());
  bool execute(const Task& task, void (*interrupt)(), std::int64_t* moved = nullptr);
  bool execute(const Call& call, bool agree_only, void (*interrupt)());
  bool run_on(const Operation& operation, const Call& call, bool agree_only, void (*interrupt)());
  void retreat();
  void run_plain(const Operation& operation, const Call& call, void (*interrupt)());
  bool run_blocks(const Operation& operation, const Call& call, void (*interrupt)());
  bool run_topk(const Operation& operation, const Call& call, void (*interrupt)());
  std::int64_t bytes_moved() const;
  void serve();
  void fail(const CollectiveError& error);
  void fail(const std::string& why, std::exception_ptr error);
  // What was handed over before a failure shares it.
  void rethrow_failure();

  const int rank_;
  int size_;
  const unsigned forks_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<Heap> heap_;
  Comm comm_;
  std::unique_ptr<TopkWorkspace> topk_;        // made at the first use
  std::unique_ptr<InternodeGroup> internode_;  // where it spans nodes
  OperationLock running_;

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<Task> queue_;
  std::atomic<int> pending_{0};
  std::atomic<bool> closed_{false};
  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::string failure_;  // why
  std::exception_ptr error_;
  const std::shared_ptr<std::atomic<bool>> told_ = std::make_shared<std::atomic<bool>>(false);
  std::thread worker_;
};

}  // namespace pycomm::cpu

// One rank's CUDA side of a group. It hands operations to kernels, and passes failures and progress
// between them and the group on the host (cpu/group/group.h), which knows the other ranks' processes. It is
// compiled in every build; without CUDA no Endpoint can be made for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "core/call.h"
#include "core/errors.h"
#include "cpu/executor/threads.h"
#include "cpu/group/group.h"
#include "cuda/endpoint.h"

namespace pycomm::cuda {

class Group {
 public:
  // `shared`: of ranks that are threads on one device; null otherwise. `interrupt` is called now and
  // then in long waits on the host, and may throw.
  Group(std::shared_ptr<cpu::Group> host, std::shared_ptr<Endpoint> endpoint,
        std::shared_ptr<SharedLaunch> shared, void (*interrupt)() = nullptr);
  // Waits until all work on the device is done. Not in a forked child: CUDA does not survive a fork, and
  // the end of a condition variable would wait for the thread that waits for it, which is not there.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  bool forked() const { return host_->forked(); }
  int device() const { return endpoint_->device(); }
  // Enqueues an uncompressed operation on the stream. A failure here aborts the group; the next call, or
  // check(), raises a failure in the kernel.
  void run(const Call& call, std::uintptr_t stream, const Sharding& sharding = {});
  // Enqueues several operations, in the same order on all ranks. Compressed ones share launches if
  // they can. `bucket`: a bucket without its parts.
  void run(const std::vector<Call>& calls, std::uintptr_t stream, Bucket bucket);
  // Returns the operation as kernels run it. Throws std::invalid_argument if they cannot.
  Operation admit(const Call& call) const;
  // Raises a kernel's failure, once; from then on the group refuses work. First waits, within the
  // group's timeout, until no rank's kernels use this rank's tensors. A group that has been closed
  // raises only that.
  void check();
  // Waits until all enqueued work is done.
  void close();

 private:
  void enqueue(const Part& part, std::uintptr_t stream, Extras extras);
  void report(const Failure& found);
  CollectiveError describe_failure(const Failure& found, std::uint64_t word) const;
  void run_together(const Part& part, std::uintptr_t stream, const Extras& extras);
  void watch();
  void count_ended();
  void stop_watching();

  std::shared_ptr<cpu::Group> host_;
  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<SharedLaunch> shared_;
  void (*const interrupt_)();
  cpu::OperationLock running_;  // operations are handed over one at a time
  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;
  std::atomic<bool> closed_{false};
  std::thread watcher_;
};

}  // namespace pycomm::cuda

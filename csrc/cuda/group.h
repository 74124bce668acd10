// One rank's CUDA side of a group: hands operations to its kernels and joins them with the group on the
// host (cpu/group.h), which knows the other ranks' processes. Compiled in every build; without CUDA
// there is no Endpoint to make one with.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "core/call.h"
#include "core/errors.h"
#include "cpu/group.h"
#include "cuda/endpoint.h"

namespace pycomm::cuda {

class Group {
 public:
  // `shared`: of ranks that are threads on one device; null otherwise. `interrupt` is called now and
  // then in long waits on the host, and may throw.
  Group(std::shared_ptr<cpu::Group> host, std::shared_ptr<Endpoint> endpoint,
        std::shared_ptr<SharedLaunch> shared, void (*interrupt)() = nullptr);
  // Waits until everything on the device has run.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Enqueues an operation on the stream. What goes wrong here aborts the group; what goes wrong in
  // the kernel is raised by the next call, or by check().
  void run(const Call& call, std::uintptr_t stream, const Compression& compression = {});
  // Raises what went wrong in a kernel, once; the group refuses work from then on. Before that, waits
  // until no rank's kernels use this rank's tensors, within the group's timeout.
  void check();
  // Waits until everything that was enqueued has run.
  void close();

 private:
  void report(const Failure& found);
  CollectiveError describe_failure(const Failure& found, std::uint64_t word) const;
  void run_together(const Operation& operation, const Call& call, std::uintptr_t stream,
                    const Compression& compression);
  void watch();
  void stop_watching();

  std::shared_ptr<cpu::Group> host_;
  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<SharedLaunch> shared_;
  void (*const interrupt_)();
  cpu::OperationLock running_;  // one operation at a time is handed over
  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;
  std::thread watcher_;
};

}  // namespace pycomm::cuda

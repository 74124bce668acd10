#include "cpu/executor/threads.h"

#include <sys/resource.h>

namespace pycomm::cpu {
namespace {

std::string limit_of(__rlimit_resource_t resource) {
  rlimit most = {};
  if (getrlimit(resource, &most) != 0) return "unknown";
  return most.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(most.rlim_cur);
}

}  // namespace

std::string thread_limits() {
  return "one of the limits on the user's threads (ulimit -u, RLIMIT_NPROC: " +
         limit_of(RLIMIT_NPROC) +
         "), the container's (pids.max), the node's (kernel.threads-max) and the address space "
         "(ulimit -v, RLIMIT_AS: " +
         limit_of(RLIMIT_AS) + ") has been reached";
}

}  // namespace pycomm::cpu

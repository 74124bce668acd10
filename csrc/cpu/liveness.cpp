#include "cpu/liveness.h"

#include <sys/syscall.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <system_error>

#include "cpu/fork.h"

namespace pycomm::cpu {
namespace {

// The processes in use, by pid.
struct Registry {
  std::mutex mutex;
  std::map<int, std::weak_ptr<Process>> processes;
};

// The registry of this process. A forked child starts with an empty one: it may have closed the
// descriptors that it inherited, and the lock may have been held by a thread that it lacks.
Registry& registry() {
  static auto* own = new Registry;
  static unsigned forks = current_forks();
  if (forks != current_forks()) {
    own = new Registry;
    forks = current_forks();
  }
  return *own;
}

}  // namespace

std::shared_ptr<Process> Process::find(int pid) {
  auto& [mutex, processes] = registry();
  const std::lock_guard lock(mutex);
  std::erase_if(processes, [](const auto& entry) { return entry.second.expired(); });
  if (const auto known = processes.find(pid); known != processes.end()) {
    // If the known process has ended, its pid now belongs to another one.
    if (auto process = known->second.lock(); process && !process->ended()) return process;
  }
  const auto fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0 && errno == ESRCH) return nullptr;
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open");
  auto process = std::make_shared<Process>(fd);
  processes[pid] = process;
  return process;
}

}  // namespace pycomm::cpu

#include "cpu/faults/liveness.h"

#include <fcntl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <csignal>
#include <map>
#include <mutex>
#include <string>
#include <system_error>

#include "cpu/group/fork.h"

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

std::shared_ptr<Process> open_process(int pid) {
  int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd >= 0) return std::make_shared<Process>(fd, Process::File::pidfd);
  const int error = errno;
  if (error == ESRCH) return nullptr;
  if (error == EPERM || error == ENOSYS) {
    fd = open(("/proc/" + std::to_string(pid) + "/statm").c_str(), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) return std::make_shared<Process>(fd, Process::File::statm);
    if (kill(pid, 0) != 0 && errno == ESRCH) return nullptr;
  }
  throw std::system_error(error, std::generic_category(),
                          "process " + std::to_string(pid) +
                              " can be watched neither by its pidfd nor in /proc: pidfd_open");
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
  auto process = open_process(pid);
  if (process) processes[pid] = process;
  return process;
}

bool Process::ended() const {
  if (file_ == File::pidfd) {
    pollfd watched = {fd_, POLLIN, 0};
    return poll(&watched, 1, 0) > 0;
  }
  // Its first number is the size of the address space, which a zombie lacks.
  char first = '0';
  return pread(fd_, &first, 1, 0) != 1 || first == '0';
}

}  // namespace pycomm::cpu

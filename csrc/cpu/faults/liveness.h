// The processes of a group's ranks, and whether they still run.
//
// A pidfd becomes readable when its process ends for any reason. Where seccomp refuses pidfds
// (Docker before 20.10), an open file of /proc/PID serves instead. Neither is confused by a reused
// pid, a zombie, or a child that inherited a socket. Ranks that are threads have neither.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

namespace pycomm::cpu {

// A process, watched by its pidfd, or by its file statm.
class Process {
 public:
  // The running process with this pid, or nullptr. Groups share the object, because the number of
  // file descriptors is limited.
  static std::shared_ptr<Process> find(int pid);

  enum class File { pidfd, statm };
  Process(int fd, File file) : fd_(fd), file_(file) {}
  ~Process() { close(fd_); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // -1 if the process is watched by its file statm.
  int pidfd() const { return file_ == File::pidfd ? fd_ : -1; }
  bool ended() const;

 private:
  const int fd_;
  const File file_;
};

class Liveness {
 public:
  // `pids` and `processes` are indexed by rank. A rank is not watched if its process is nullptr. If
  // the group spans nodes, `numbers` are their ranks in the whole group, and `pids` is indexed by
  // these.
  Liveness(std::vector<int> pids, std::vector<std::shared_ptr<Process>> processes,
           std::vector<int> numbers = {})
      : pids_(std::move(pids)), processes_(std::move(processes)), numbers_(std::move(numbers)) {
    for (const auto& process : processes_) {
      watched_.push_back({process ? process->pidfd() : -1, POLLIN, 0});
      by_pidfds_ = by_pidfds_ && (!process || process->pidfd() >= 0);
    }
    if (numbers_.empty()) {
      for (std::size_t r = 0; r < processes_.size(); ++r) numbers_.push_back(static_cast<int>(r));
    }
  }

  // The number of ranks in the whole group.
  int count() const { return static_cast<int>(pids_.size()); }
  int number(int r) const { return numbers_[static_cast<std::size_t>(r)]; }
  int pid_of(int number) const { return pids_[static_cast<std::size_t>(number)]; }
  int pid(int r) const { return pid_of(number(r)); }

  // True if rank r is another process, not a thread of this one.
  bool watched(int r) const { return processes_[static_cast<std::size_t>(r)] != nullptr; }
  bool ended(int r) const { return watched(r) && processes_[static_cast<std::size_t>(r)]->ended(); }
  // Calls found(r) for each rank whose process has ended; with pidfds, a single system call.
  template <class Found>
  void find_ended(Found found) const {
    if (!by_pidfds_) {
      for (std::size_t r = 0; r < processes_.size(); ++r) {
        if (ended(static_cast<int>(r))) found(static_cast<int>(r));
      }
      return;
    }
    std::vector<pollfd> fds = watched_;
    if (poll(fds.data(), fds.size(), 0) <= 0) return;
    for (std::size_t r = 0; r < fds.size(); ++r) {
      if (fds[r].revents != 0) found(static_cast<int>(r));
    }
  }

 private:
  std::vector<int> pids_;
  std::vector<std::shared_ptr<Process>> processes_;
  std::vector<pollfd> watched_;  // pidfds of `processes_`
  bool by_pidfds_ = true;
  std::vector<int> numbers_;
};

}  // namespace pycomm::cpu

// Which processes the ranks are, and whether they still run.
//
// A pidfd becomes readable when its process ends, in whatever way, and cannot be fooled by a reused
// pid, a zombie or a child that inherited a socket. Ranks that are threads have none.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <utility>
#include <vector>

namespace pycomm::cpu {

class Liveness {
 public:
  // Both indexed by rank; owns the pidfds from then on. A pidfd of -1 is not watched. Where the
  // ranks are those of one machine among several, `numbers` is what the whole group calls them, and
  // `pids` goes by these numbers.
  Liveness(std::vector<int> pids, const std::vector<int>& pidfds, std::vector<int> numbers = {})
      : pids_(std::move(pids)), numbers_(std::move(numbers)) {
    for (const int fd : pidfds) watched_.push_back({fd, POLLIN, 0});
    if (numbers_.empty()) {
      for (std::size_t r = 0; r < pidfds.size(); ++r) numbers_.push_back(static_cast<int>(r));
    }
  }
  ~Liveness() {
    for (const pollfd& watched : watched_) {
      if (watched.fd >= 0) close(watched.fd);
    }
  }
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Ranks of the whole group.
  int count() const { return static_cast<int>(pids_.size()); }
  int number(int r) const { return numbers_[static_cast<std::size_t>(r)]; }
  int pid_of(int number) const { return pids_[static_cast<std::size_t>(number)]; }
  int pid(int r) const { return pid_of(number(r)); }

  // Whether rank r is a process of its own, and not a thread of this one.
  bool watched(int r) const { return watched_[static_cast<std::size_t>(r)].fd >= 0; }
  bool ended(int r) const {
    pollfd fd = watched_[static_cast<std::size_t>(r)];
    return fd.fd >= 0 && poll(&fd, 1, 0) > 0;
  }
  // Calls found(r) for each rank whose process has ended; takes one system call.
  template <class Found>
  void find_ended(Found found) const {
    std::vector<pollfd> fds = watched_;
    if (poll(fds.data(), fds.size(), 0) <= 0) return;
    for (std::size_t r = 0; r < fds.size(); ++r) {
      if (fds[r].revents != 0) found(static_cast<int>(r));
    }
  }

 private:
  std::vector<int> pids_;
  std::vector<pollfd> watched_;  // by pidfd
  std::vector<int> numbers_;
};

}  // namespace pycomm::cpu

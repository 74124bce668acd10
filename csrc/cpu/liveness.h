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
  Liveness(std::vector<int> pids, std::vector<int> pidfds, std::vector<int> numbers = {})
      : pids_(std::move(pids)), pidfds_(std::move(pidfds)), numbers_(std::move(numbers)) {
    if (numbers_.empty()) {
      for (std::size_t r = 0; r < pidfds_.size(); ++r) numbers_.push_back(static_cast<int>(r));
    }
  }
  ~Liveness() {
    for (const int fd : pidfds_) {
      if (fd >= 0) close(fd);
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
  bool watched(int r) const { return pidfds_[static_cast<std::size_t>(r)] >= 0; }
  bool ended(int r) const {
    pollfd fd{pidfds_[static_cast<std::size_t>(r)], POLLIN, 0};
    return fd.fd >= 0 && poll(&fd, 1, 0) > 0;
  }

 private:
  std::vector<int> pids_;
  std::vector<int> pidfds_;
  std::vector<int> numbers_;
};

}  // namespace pycomm::cpu

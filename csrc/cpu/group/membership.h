// What a rank is doing in its other groups, for error messages.
//
// If ranks use two groups in different orders, they wait for each other in both, and the ranks of
// one group cannot see the other group. So a rank that has waited for long in one group writes that
// into the windows of all groups that it belongs to. A timeout there then tells what the rank to
// blame is waiting for.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/message.h"
#include "cpu/faults/liveness.h"
#include "cpu/memory/window.h"

namespace pycomm::cpu {

// One rank's membership in one group. The object must not be moved.
class Membership {
 public:
  Membership(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
             int size);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // Says that this rank does not use the group any more.
  void leave();

  // Sets the group's name in this process.
  void set_name(std::string name);
  std::string name() const;

  // Records that this rank waits for rank r in an operation of this group. The first recorded wait
  // stays until it has ended.
  void tell(int r, Collective collective, std::uint32_t ordinal);
  // The recorded wait has ended.
  void end(bool failed);
  // Describes what rank r is waiting for in another group. Empty if nothing.
  std::string describe(int r) const;

 private:
  Control& mine() const { return window_->control(rank_); }
  bool is_same_rank(const Membership& other) const { return other.thread_ == thread_; }
  bool waits_here(int number, int pid) const;

  const std::shared_ptr<Window> window_;
  const std::shared_ptr<const Liveness> peers_;
  const int rank_;
  const int size_;
  const int thread_;  // if the rank is a thread, its number; else -1
  std::string name_;
};

// A wait that may be recorded; if it is, its end is recorded, too.
class ToldWait {
 public:
  explicit ToldWait(Membership& membership) : membership_(membership) {}
  ~ToldWait() {
    if (told_) membership_.end(!over_);
  }
  ToldWait(const ToldWait&) = delete;
  ToldWait& operator=(const ToldWait&) = delete;

  void tell(int r, const Operation& operation, std::uint32_t ordinal) {
    membership_.tell(r, operation.collective, ordinal);
    told_ = true;
  }
  // The wait has succeeded.
  void over() { over_ = true; }

 private:
  Membership& membership_;
  bool told_ = false;
  bool over_ = false;
};

}  // namespace pycomm::cpu

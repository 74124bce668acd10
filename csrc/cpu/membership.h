// What a rank does in its other groups, for a message about one of them.
//
// Ranks that use two groups in different orders wait for each other in both. The ranks of one group
// cannot see the other. So a rank that has waited for long in one group says so in the windows of all
// groups that it is in, and a timeout there tells what the rank to blame waits for.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/message.h"
#include "cpu/liveness.h"
#include "cpu/window.h"

namespace pycomm::cpu {

// One rank's place in one group. It must stay where it is.
class Membership {
 public:
  Membership(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
             int size);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // What the group is called in this process.
  void set_name(std::string name);

  // This rank waits for rank r, in an operation of this group. The first wait that is told stays until
  // it has ended.
  void tell(int r, Collective collective, std::uint32_t ordinal);
  // The wait that was told has ended.
  void end(bool failed);
  // What rank r, which others wait for here, waits for in another group. Empty if in none.
  std::string describe(int r) const;

 private:
  Control& mine() const { return window_->control(rank_); }
  bool is_same_rank(const Membership& other) const { return other.thread_ == thread_; }
  bool waits_here(int number, int pid) const;

  const std::shared_ptr<Window> window_;
  const std::shared_ptr<const Liveness> peers_;
  const int rank_;
  const int size_;
  const int thread_;  // the number of a rank that is a thread, -1 of a process
  std::string name_;
};

// A wait that may be told; how it ends is told, too.
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
  // It has ended well.
  void over() { over_ = true; }

 private:
  Membership& membership_;
  bool told_ = false;
  bool over_ = false;
};

}  // namespace pycomm::cpu

#include "cpu/faults/shrink.h"

#include <algorithm>
#include <thread>

#include "cpu/executor/waiting.h"
#include "cpu/executor/waiting_time.h"
#include "cpu/group/operation_lock.h"

namespace pycomm::cpu {
namespace {

// What a rank says. The values of Control::shrinking.
enum Said : std::uint32_t { kNothing, kArrived, kHasNoRoom, kWithdrawn };

constexpr int kMostRanks = 64 * static_cast<int>(std::size(Control::Proposal{}.members));

class Shrink {
 public:
  Shrink(const Window& window, const Comm& comm, const std::atomic<bool>& stopped,
         Clock::duration patience, void (*interrupt)(), const std::vector<int>& excluded)
      : window_(window),
        comm_(comm),
        stopped_(stopped),
        patience_(patience),
        interrupt_(interrupt),
        excluded_(excluded) {}

  Survivors run() {
    PYCOMM_CHECK(comm_.size() <= kMostRanks, "a group that shrinks must have at most " +
                                                 std::to_string(kMostRanks) + " ranks, it has " +
                                                 std::to_string(comm_.size()));
    say(kArrived);
    try {
      await_decision();
      return join();
    } catch (...) {
      withdraw();
      throw;
    }
  }

 private:
  Control& control(int r) const { return window_.control(r); }
  int rank() const { return comm_.rank(); }
  void say(Said said) { control(rank()).shrinking.store(said); }
  std::uint32_t said(int r) const { return control(r).shrinking.load(); }
  bool excludes(int r) const {
    return std::find(excluded_.begin(), excluded_.end(), r) != excluded_.end();
  }
  std::uint32_t decision() const { return control(0).decision.load(); }

  void await_decision() {
    WaitingTime waited;
    Clock::time_point interrupt_at = Clock::now() + kInterruptEvery;
    for (Clock::duration sleep = kNap; decision() == 0;) {
      const Clock::time_point now = Clock::now();
      const bool late = waited.until(now) > patience_;
      if ((late || all_are_here()) && is_to_propose(late)) {
        propose();
        continue;
      }
      if (waited.time() > 2 * patience_) throw no_room();  // others have room, but do not answer
      if (stopped_.load()) throw GroupUnusable("group was aborted or closed while it shrank");
      if (interrupt_ != nullptr && now > interrupt_at) {
        interrupt_();
        interrupt_at = now + kInterruptEvery;
      }
      sleep = std::min<Clock::duration>(2 * sleep, kLookEvery);
      std::this_thread::sleep_for(sleep);
    }
  }

  // True if every rank has come, or will not come.
  bool all_are_here() const {
    const int unresponsive = comm_.unresponsive();
    for (int r = 0; r < comm_.size(); ++r) {
      if (excludes(r)) continue;
      if (said(r) == kNothing && comm_.number(r) != unresponsive && !comm_.gone(r)) return false;
    }
    return true;
  }

  // True if this rank is the lowest live rank with room, or if it has room and has lost patience.
  bool is_to_propose(bool late) const {
    for (int r = 0; r < comm_.size(); ++r) {
      if (excludes(r)) continue;
      if (said(r) == kArrived && !comm_.ended(r)) return r == rank() || (late && has_room());
    }
    throw no_room();
  }
  static OutOfMemory no_room() {
    return OutOfMemory("no rank has room in its heap for the window of the smaller group");
  }
  bool has_room() const { return said(rank()) == kArrived; }

  std::vector<int> arrived() const {
    std::vector<int> ranks;
    for (int r = 0; r < comm_.size(); ++r) {
      const std::uint32_t what = said(r);
      if (excludes(r)) continue;
      if ((what == kArrived || what == kHasNoRoom) && !comm_.ended(r)) ranks.push_back(r);
    }
    return ranks;
  }

  void propose() {
    const std::vector<int> members = arrived();
    Window::Place place;
    try {
      place = window_.reserve(rank(), static_cast<int>(members.size()), {});
    } catch (const OutOfMemory&) {
      say(kHasNoRoom);
      return;
    }
    Control::Proposal& proposal = control(rank()).proposal;
    proposal = {place.offset, place.id, {}};
    for (const int r : members) proposal.members[r / 64] |= std::uint64_t{1} << r % 64;
    std::uint32_t none = 0;
    const auto mine = static_cast<std::uint32_t>(rank()) + 1;
    if (control(0).decision.compare_exchange_strong(none, mine)) {
      count_the_dead(members);
    } else {
      window_.cancel(place);
    }
  }

  // Dead ranks cannot leave the window themselves, and its memory is freed when all ranks have left
  // it.
  void count_the_dead(const std::vector<int>& members) {
    std::uint32_t dead = 0;
    for (int r = 0; r < comm_.size(); ++r) {
      const bool is_member = std::find(members.begin(), members.end(), r) != members.end();
      if (!is_member && comm_.ended(r) && !comm_.left(r)) ++dead;
    }
    window_.depart_for(dead);
  }

  struct Decided {
    Window::Place place;
    std::vector<int> members;
    int size() const { return static_cast<int>(members.size()); }
    int member(int r) const { return members[static_cast<std::size_t>(r)]; }
    // The new number of a rank; -1 if it is not a member.
    int index_of(int former) const {
      const auto found = std::find(members.begin(), members.end(), former);
      return found == members.end() ? -1 : static_cast<int>(found - members.begin());
    }
  };
  Decided decided() const {
    const int author = static_cast<int>(decision()) - 1;
    PYCOMM_CHECK(author >= 0 && author < comm_.size(), kOverwritten);
    const Control::Proposal& proposal = control(author).proposal;
    Decided smaller{window_.place(author, proposal.offset, proposal.id), {}};
    for (int r = 0; r < comm_.size(); ++r) {
      if ((proposal.members[r / 64] >> r % 64 & 1) != 0) smaller.members.push_back(r);
    }
    return smaller;
  }

  Survivors join() {
    const Decided smaller = decided();
    const int index = smaller.index_of(rank());
    if (index < 0) {
      throw GroupUnusable("group has shrunk without this rank, which came too late");
    }
    for (int r = 0; r < smaller.size(); ++r) {
      // It may have withdrawn before there was a decision that it could see.
      if (said(smaller.member(r)) == kWithdrawn) leave(smaller, r);
    }
    return {std::make_shared<Window>(window_, smaller.members, index, smaller.place),
            smaller.members};
  }

  // If this rank is a member of the smaller group, it is gone there. Either it sees the decision
  // here, or the others see that it has withdrawn.
  void withdraw() {
    say(kWithdrawn);
    if (decision() == 0) return;
    const Decided smaller = decided();
    if (const int index = smaller.index_of(rank()); index >= 0) leave(smaller, index);
  }

  void leave(const Decided& smaller, int r) const {
    window_.leave_at(smaller.place, smaller.size(), r);
  }

  const Window& window_;
  const Comm& comm_;
  const std::atomic<bool>& stopped_;
  const Clock::duration patience_;
  void (*const interrupt_)();
  const std::vector<int>& excluded_;
};

}  // namespace

Survivors shrink(const Window& window, const Comm& comm, const std::atomic<bool>& stopped,
                 Clock::duration patience, void (*interrupt)(), const std::vector<int>& excluded) {
  return Shrink(window, comm, stopped, patience, interrupt, excluded).run();
}

}  // namespace pycomm::cpu

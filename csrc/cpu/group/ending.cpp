// How a group ends: by an abort or a failure, when its rank leaves, when it is shrunk or closed.
#include "cpu/group/group.h"

namespace pycomm::cpu {

void Group::abort() {
  if (forked()) return;
  if (shrunk_) stops_shrinking_ = true;
  abort(pycomm::abort_word(Reason::aborted, rank_));
  if (internode_ != nullptr) internode_->tell();
}

void Group::abort(std::uint64_t word) {
  const std::lock_guard lock(departing_mutex_);
  if (!departed_) comm_.abort(word);
}

void Group::leave() {
  if (forked()) return;
  {
    const std::lock_guard lock(departing_mutex_);
    if (departed_) return;
    comm_.leave();
  }
  // Without the lock, because a transport may run Python, and so a signal's handler that aborts.
  if (internode_ == nullptr) return;
  // Ranks of other nodes may wait for messages of this one, although it has never sent any.
  if (p2p_ != nullptr) p2p_->leave();  // null if span() has failed
  internode_->leave();
}

// Other ranks may use the memory for something else from now on.
void Group::depart() {
  const std::lock_guard lock(departing_mutex_);
  departed_ = true;
  comm_.depart();
}

int Group::unresponsive() {
  const std::lock_guard lock(departing_mutex_);
  return departed_ ? -1 : comm_.unresponsive();
}

std::uint64_t Group::ended_by() {
  const std::lock_guard lock(departing_mutex_);
  return departed_ || comm_.aborted() == 0 ? 0 : comm_.last_word();
}

void Group::end_waits_of(std::span<const std::shared_ptr<Group>> others) {
  if (!idle() || closed_) return;  // if not idle, work may follow; if closed, others know
  std::vector<Group*> beyond;
  for (const auto& other : others) {
    if (other->p2p_awaits(rank_)) other->abort(pycomm::abort_word(Reason::returned, rank_));
    if (other->collectives_idle()) continue;
    if (reached(comm_.ordinal(), other->comm_.ordinal())) return;
    beyond.push_back(other.get());
  }
  for (Group* other : beyond) other->abort(pycomm::abort_word(Reason::returned, rank_));
}

void Group::fail(const std::string& why) {
  fail(why, std::make_exception_ptr(GroupUnusable("group has failed: " + why)));
}

void Group::fail(const CollectiveError& error) {
  fail(error.what(), std::make_exception_ptr(error));
}

void Group::fail(const std::string& why, std::exception_ptr error) {
  const std::lock_guard lock(failure_mutex_);
  if (failed_) return;
  failure_ = why;
  error_ = std::move(error);
  failed_.store(true, std::memory_order_release);
}

void Group::rethrow_failure() {
  const std::lock_guard lock(failure_mutex_);
  if (error_) std::rethrow_exception(error_);
}

void Group::close_p2p(void (*interrupt)()) {
  const std::lock_guard closing(closing_p2p_mutex_);  // close() and shrink() may come together
  p2p::Engine* engine = nullptr;
  {
    const std::lock_guard lock(p2p_mutex_);
    engine = p2p_.get();
  }
  if (engine != nullptr) engine->close(interrupt);
}

Survivors Group::shrink(Clock::duration patience, void (*interrupt)(),
                        const std::vector<int>& excluded) {
  if (forked() || closed_) check_usable();
  PYCOMM_CHECK(internode_ == nullptr, "a group that spans nodes cannot shrink");
  running_.check_not_held();
  if (shrunk_) throw GroupUnusable("group has been shrunk");
  abort();
  close_p2p(interrupt);
  wait_until_idle(interrupt != nullptr ? interrupt : [] {});
  const std::lock_guard lock(running_);
  if (shrunk_.exchange(true)) throw GroupUnusable("group has been shrunk");
  if (closed_) check_usable();  // closed while this thread waited for the lock
  fail("it was shrunk");        // if no operation has failed
  comm_.wait_for_kernels(patience, interrupt);
  return cpu::shrink(*window_, comm_, stops_shrinking_, patience, interrupt, excluded);
}

void Group::close(void (*interrupt)()) {
  if (forked()) return;  // only the parent may leave the group
  running_.check_not_held();
  {
    const std::lock_guard lock(queue_mutex_);
    if (closed_.exchange(true)) return;
    queue_changed_.notify_all();
  }
  if (shrunk_) stops_shrinking_ = true;
  std::exception_ptr interrupted;
  const auto wait_in = [&](auto function) {
    try {
      function();
    } catch (...) {
      interrupted = std::current_exception();
      abort();
    }
  };
  wait_in([&] { wait_until_idle(interrupt); });
  if (worker_.joinable()) worker_.join();
  const std::lock_guard lock(running_);    // waits for another thread's operation
  wait_in([&] { close_p2p(interrupt); });  // last, because collectives may consist of messages
  leave();
  depart();
  if (interrupted) std::rethrow_exception(interrupted);
}

}  // namespace pycomm::cpu

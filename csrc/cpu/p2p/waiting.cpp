// How operations proceed: threads that wait drive them, or else the engine's own thread.
#include "cpu/executor/waiting.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "cpu/group/fork.h"
#include "cpu/group/operation_lock.h"
#include "cpu/p2p/engine.h"

namespace pycomm::cpu::p2p {
namespace {

// The time for which the engine's thread leaves pending operations to a thread that is about to
// wait for them.
constexpr auto kTakeOver = std::chrono::microseconds(500);
// The longest sleep while work of the device runs, which rings no bell.
constexpr Clock::duration kDeviceNap = std::chrono::microseconds(100);

// Releases a lock for its lifetime.
class Released {
 public:
  explicit Released(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Released() { lock_.lock(); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

// Returns when the core was back. Another thread may then still have the lock.
Clock::time_point yield_without(std::unique_lock<std::mutex>& lock) {
  const Released released(lock);
  sched_yield();
  return Clock::now();
}

}  // namespace

bool Request::wait(Clock::duration patience) { return engine->wait(*this, patience); }

void Request::wait(void (*interrupt)()) { engine->wait(*this, interrupt); }

void Engine::check_not_forked() const {
  if (forks_ != current_forks()) {
    throw GroupUnusable("the request belongs to the parent of this forked process");
  }
}

bool Engine::wait(Request& request, Clock::duration patience) {
  check_not_forked();
  if (!request.completed() && !await(request, Clock::now() + patience, nullptr)) return false;
  rethrow(request);
  return true;
}

void Engine::wait(Request& request, void (*interrupt)()) {
  check_not_forked();
  finish(request, interrupt);
  rethrow(request);
}

// Throws what a request has ended with. If it has ended alone, the group fails now: a rank that waits for
// it has missed something that it needs.
void Engine::rethrow(Request& request) {
  try {
    request.rethrow();
  } catch (const CollectiveError& error) {
    Lock lock(mutex_);
    guarded(lock, [&] {
      if (!std::exchange(request.ended_alone, false) || ended_) return false;
      abort(abort_word(error.reason, error.rank), {});
      failed_(error);
      throw Stopped();
    });
    throw;
  }
}

// Waits until a request has completed or failed. Throws only what `interrupt` throws.
void Engine::finish(Request& request, void (*interrupt)()) {
  if (request.completed()) return;
  try {
    await(request, Clock::time_point::max(), interrupt);
  } catch (...) {
    // The request must have ended before the caller frees its buffer.
    node_.comm.abort(Reason::aborted, node_.rank());
    await(request, Clock::time_point::max(), nullptr);
    throw;
  }
}

bool Engine::await(Request& request, Clock::time_point until, void (*interrupt)()) {
  Lock lock(mutex_);
  struct Waiter {
    Engine& engine;
    Request& request;
    Waiter(Engine& engine, Request& request) : engine(engine), request(request) {
      ++engine.waiters_;
      if (++request.waiters == 1 && !request.always_timed) request.since = Request::kUnset;
      // The engine's thread gives way.
      if (engine.dozing_ > 0) engine.node_.ring(engine.node_.rank());
    }
    ~Waiter() {
      --request.waiters;
      if (--engine.waiters_ == 0) engine.mine().p2p_waiting.store(0, std::memory_order_release);
      engine.changed_.notify_all();
    }
  } const waiter(*this, request);

  const auto over = [&] { return request.completed(); };
  Clock::time_point interrupt_at = Clock::now() + kInterruptEvery;
  while (!over()) {
    const Clock::time_point next = std::min(until, interrupt_at);
    if (driven_) {
      changed_.wait_until(lock, next);
    } else {
      driven_ = true;
      drive(lock, next, over);
      driven_ = false;
    }
    const Clock::time_point now = Clock::now();
    if (now < next || over()) continue;
    if (now >= until) return false;
    interrupt_at = now + kInterruptEvery;
    if (interrupt == nullptr) continue;
    const Released released(lock);
    interrupt();
  }
  return true;
}

template <class Over>
void Engine::drive(Lock& lock, Clock::time_point until, Over over) {
  int spins = node_.comm.spins();
  Clock::time_point idle_since = {};
  Clock::duration sleep = kNap;
  while (!over()) {
    const bool moved = guarded(lock, [this] { return progress(); });
    if (over()) return;
    if (moved) {
      if (waiters_ > 1) changed_.notify_all();
      idle_since = {};
      sleep = kNap;
    } else if (--spins > 0) {
      const Released released(lock);
      pause_core();
      continue;
    }
    const Clock::time_point now = Clock::now();
    guarded(lock, [&] { return look(now), true; });
    if (now > until || over()) return;
    if (moved) {
      const Released released(lock);  // for threads that start operations
      continue;
    }
    if (idle_since == Clock::time_point{}) idle_since = now;
    if (yielding_.pays(idle_since, now)) {
      yielding_.took(now, yield_without(lock));
    } else {
      sleep =
          std::min<Clock::duration>(2 * sleep, node_.awaits_device ? kDeviceNap : kLongestSleep);
      doze(lock, sleep);
    }
  }
}

// Sleeps until another rank wakes this one. First looks again, for what came before others could
// see that this rank sleeps.
void Engine::doze(Lock& lock, Clock::duration most) {
  Control& control = mine();
  const std::uint32_t rung = control.p2p_bell.rung();
  control.p2p_asleep.fetch_add(1);
  ++dozing_;
  if (!guarded(lock, [this] { return progress(); })) {
    const Released released(lock);
    streams_ ? streams_->sleep(most) : control.p2p_bell.sleep(rung, most);
  }
  --dozing_;
  control.p2p_asleep.fetch_sub(1);
}

void Engine::serve() {
  Lock lock(mutex_);
  const auto pending = [&] { return !node_.requests.pending().empty(); };
  while (true) {
    resting_ = true;
    thread_needed_.wait(lock, [&] { return pending() || stopping_; });
    resting_ = false;
    if (stopping_) return;
    thread_needed_.wait_for(lock, kTakeOver, [&] { return stopping_; });
    if (node_.copies) node_.copies->make_current();
    const auto over = [&] { return waiters_ > 0 || !pending() || stopping_; };
    drive(lock, Clock::time_point::max(), over);
  }
}

bool Engine::guarded(Lock& lock, const std::function<bool()>& work) {
  bool moved = true;
  try {
    moved = work();
  } catch (const Stopped&) {
    fail(cause_);
  } catch (const Streams::Malformed& error) {
    abort(abort_word(Reason::malformed, error.rank), error.what());
    fail(cause_);
  } catch (const std::exception& error) {
    node_.comm.abort(Reason::aborted, node_.rank());
    fail(error.what());
  }
  if (node_.requests.any_finished()) {
    const auto finished = node_.requests.take_finished();
    const Released released(lock);
    for (const RequestPtr& request : finished)
      request->callback.function(request->callback.context);
  }
  return moved;
}

bool Engine::progress() {
  if (node_.requests.pending().empty()) return false;
  if (node_.comm.aborted() != 0) throw Stopped();
  node_.awaits_device = false;
  // First, because this forgets knocks of this node's ranks.
  bool moved = streams_ && streams_->progress();
  for (int r = 0; r < node_.comm.size(); ++r) moved |= progress_with(r);
  return moved;
}

bool Engine::progress_with(int r) {
  if (r == node_.rank()) return false;
  const auto index = static_cast<std::size_t>(r);
  try {
    const bool moved = incoming_[index].progress();
    return outgoing_[index].progress() || moved;
  } catch (const std::invalid_argument& error) {
    stop_with(abort_word(Reason::malformed, node_.comm.number(r)), error.what());
  }
}

void Engine::abort(std::uint64_t word, const std::string& cause) {
  node_.comm.abort(word);
  if (node_.comm.aborted() == word) cause_ = cause;
}

void Engine::stop_with(std::uint64_t word, const std::string& cause) {
  abort(word, cause);
  throw Stopped();
}

void Engine::look(Clock::time_point now) {
  const Clock::duration time = clock_.until(now);
  if (now < look_at_ || node_.requests.pending().empty()) return;
  look_at_ = now + kLookEvery;
  look_for_the_gone(time);
  check_deadlines(now, time);
}

// A rank that has left or died sends nothing more, but what it has sent counts.
void Engine::look_for_the_gone(Clock::duration time) {
  const Comm& comm = node_.comm;
  const auto check = [&](int r, bool died) {
    while (progress_with(r)) continue;
    check_gone(comm.number(r), died);
  };
  int here = 1;  // ranks that have not left
  for (int r = 0; r < comm.size(); ++r) {
    if (r == node_.rank()) continue;
    comm.left(r) ? check(r, false) : void(++here);
  }
  for (int rank = 0; streams_ && rank < world(); ++rank) {
    if (!streams_->reach(rank)) continue;
    const std::optional<Streams::End> end = streams_->end_of(rank, time);
    end ? check_gone(rank, *end == Streams::End::died) : void(++here);
  }
  if (here == 1 && world() > 1) check_gone((self() + 1) % world(), true);
  comm.peers().find_ended([&](int r) { check(r, !comm.left(r)); });
  looked_at_ = (looked_at_ + 1) % comm.size();  // one per call: each costs a system call
  // A process that has ended normally has no lock any more, either.
  if (looked_at_ != node_.rank() && comm.replaced(looked_at_)) {
    check(looked_at_, !comm.left(looked_at_));
  }
}

// A rank is gone, and all that it has sent has been taken.
void Engine::check_gone(int rank, bool died) {
  if (!died) end_receives_from(rank);
  if (needs(rank, died)) stop_with(abort_word(Reason::peer_died, rank), {});
}

// A rank that has left in order owes the group nothing. So receives from it that nobody waits for, except
// close(), end alone, and the group goes on.
void Engine::end_receives_from(int rank) {
  if (!needs(rank, false)) return;
  const auto pending = node_.requests.pending();
  for (const RequestPtr& request : pending) {
    const bool is_waited_for = (request->waiters > 0 && !ended_) || request->always_timed;
    if (request->peer != rank || is_waited_for || !matcher_.forget(request)) continue;
    CollectiveError error = failure_of(abort_word(Reason::peer_died, rank), *request, {});
    error.group = node_.comm.report();
    request->error = std::make_exception_ptr(error);
    request->ended_alone = true;
    node_.requests.complete(request);
  }
}

// True if a pending request needs a rank. A receive from any source needs every rank that has not
// said that it leaves.
bool Engine::needs(int rank, bool died) const {
  const auto& pending = node_.requests.pending();
  return std::any_of(pending.begin(), pending.end(), [&](const RequestPtr& request) {
    return request->peer == rank || (request->peer == kAnySource && died);
  });
}

void Engine::check_deadlines(Clock::time_point now, Clock::duration time) {
  const Request* waits = nullptr;
  for (const RequestPtr& request : node_.requests.pending()) {
    if (request->waiters == 0 && !request->always_timed) continue;
    if (request->since == Request::kUnset) request->since = time;
    if (time - request->since > request->timeout) time_out(*request, time - request->since);
    if (request->waiters > 0) waits = request.get();
  }
  const std::uint64_t word =
      waits == nullptr ? 0 : message_wait_word(node_.comm.index_of(waits->peer), now);
  mine().p2p_waiting.store(word, std::memory_order_release);
}

void Engine::time_out(const Request& request, Clock::duration time) {
  const Comm& comm = node_.comm;
  const double seconds = std::chrono::duration<double>(time).count();
  if (request.peer == kAnySource) stop_with(any_source_timeout_word(self(), seconds), {});
  const int here = comm.index_of(request.peer);
  const int culprit = here < 0 ? request.peer : comm.number(comm.culprit(here));
  stop_with(timeout_word(culprit, self(), seconds), {});
}

}  // namespace pycomm::cpu::p2p

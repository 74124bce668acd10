// close() while other threads submit and run operations, in all orders with few delays
// (checker/explorer.h). Every operation must end with a result or with GroupUnusable, and the
// worker must have ended. The threads of cpu/group/group.cpp are fibers here, and their locks and waits
// call the scheduler.
#include <pthread.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "checker/atomics.h"
#include "checker/clock.h"
#include "checker/explorer.h"
#include "cpu/group/group.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using checker::Violation;

struct Run {
  checker::Fibers fibers;
  std::map<const void*, bool> locked;            // by mutex
  std::map<const void*, std::int64_t> notified;  // by condition variable: number of notifications
  // The thread that the group may start.
  void* (*worker)(void*) = nullptr;
  void* argument = nullptr;
  bool worker_ended = false;
  std::size_t users = 0;  // threads that have not finished
};
Run* run = nullptr;

void lock(const void* mutex) {
  run->fibers.pause();
  run->fibers.wait_until([=] { return !run->locked[mutex]; }, [] { return "waits for a lock"; });
  run->locked[mutex] = true;
}

bool try_lock(const void* mutex) {
  run->fibers.pause();
  return !std::exchange(run->locked[mutex], true);
}

void unlock(const void* mutex) {
  run->locked[mutex] = false;
  run->fibers.pause();
}

void wait(const void* condition, const void* mutex) {
  const std::int64_t before = run->notified[condition];
  run->locked[mutex] = false;
  run->fibers.wait_until([=] { return run->notified[condition] != before; },
                         [] { return "waits for a notification"; });
  lock(mutex);
}

void notify(const void* condition) {
  ++run->notified[condition];
  run->fibers.pause();
}

// The fiber that becomes the group's thread when one is started.
void work() {
  run->fibers.wait_until([] { return run->worker != nullptr || run->users == 0; },
                         [] { return "is no thread yet"; });
  if (run->worker != nullptr) run->worker(run->argument);
  run->worker_ended = true;
}

// Runs `body`; false if the group was unusable.
bool usable(const std::function<void()>& body) {
  try {
    body();
    return true;
  } catch (const cpu::GroupUnusable&) {
    return false;
  }
}

struct User {
  cpu::Group& group;
  float input = 1, output = 0;

  Call call() {
    return {{Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, 1},
            &input,
            &output};
  }
  void check() const {
    if (output != input) throw Violation("an operation has completed without a result");
  }
  void submits() {
    std::shared_ptr<cpu::Work> work;
    if (!usable([&] { work = group.submit({call()}); })) return;
    const auto wait = [&] {
      if (!work->wait(std::chrono::hours(1))) throw Violation("a work has not completed");
    };
    if (usable(wait)) check();
  }
  void runs() {
    if (usable([&] { group.run(call()); })) check();
  }
};

void once(checker::Fibers::Choice choice) {
  constexpr std::int64_t kSlice = 1 << 20, kStaging = 8 << 10;
  static const auto window =
      std::make_shared<cpu::Window>(cpu::Window::create(1, kSlice, kStaging), 1, kSlice, kStaging);
  const auto peers = std::make_shared<const cpu::Liveness>(
      std::vector<int>{0}, std::vector<std::shared_ptr<cpu::Process>>(1));
  cpu::Group group(window, peers, 0, 1, 1, std::chrono::hours(1), 0);
  User first{group}, second{group};
  const std::vector<std::function<void()>> users = {[&] { first.submits(); },
                                                    [&] { second.runs(); }, [&] { group.close(); }};
  Run mine{checker::Fibers(std::move(choice)), {}, {}, nullptr, nullptr, false, users.size()};
  run = &mine;
  const auto pause = [](const volatile void*) { run->fibers.pause(); };
  const auto go_on = [](const volatile void*) {};
  const auto of_group = [&](const volatile void* address) {
    const std::less_equal<const volatile void*> up_to;
    return up_to(&group, address) && up_to(address, &group + 1);
  };
  const auto thread = [] { return run->fibers.current(); };
  const checker::AtomicsObserver observer{of_group, false, thread, pause, go_on, pause, go_on};
  checker::observe_atomics(&observer);
  try {
    mine.fibers.run(static_cast<int>(users.size()) + 1, [&](int i) {
      const auto index = static_cast<std::size_t>(i);
      if (index == users.size()) return work();
      users[index]();
      --run->users;
    });
  } catch (const std::exception& error) {
    // Unfinished fibers hold locks, so the group cannot be closed.
    std::printf("FAILED  %s\n", error.what());
    std::fflush(stdout);
    std::_Exit(1);
  }
  checker::observe_atomics(nullptr);
  run = nullptr;
}

void close_against_submit() {
  checker::Explorer explorer(3);
  while (explorer.next()) once(explorer.choice());
}

}  // namespace
}  // namespace pycomm::test

// Replaces the system's functions. There is one real thread, which needs no locks.
using pycomm::test::run;

extern "C" {
int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (run != nullptr) pycomm::test::lock(mutex);
  return 0;
}
int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  return run == nullptr || pycomm::test::try_lock(mutex) ? 0 : EBUSY;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  if (run != nullptr) pycomm::test::unlock(mutex);
  return 0;
}
int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  pycomm::test::wait(condition, mutex);
  return 0;
}
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t,
                           const timespec*) {
  return pthread_cond_wait(condition, mutex);
}
int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (run != nullptr) pycomm::test::notify(condition);
  return 0;
}
int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  return pthread_cond_signal(condition);
}
int pthread_create(pthread_t* thread, const pthread_attr_t*, void* (*body)(void*),
                   void* argument) noexcept {
  *thread = 1;
  run->worker = body;
  run->argument = argument;
  run->fibers.pause();
  return 0;
}
pthread_t pthread_self() noexcept { return run == nullptr ? 1 : run->fibers.current() + 2; }
int pthread_join(pthread_t, void**) {
  run->fibers.wait_until([] { return run->worker_ended; }, [] { return "joins"; });
  return 0;
}
}

int main() {
  using namespace pycomm::test;
  return run_all({{"close against submit", close_against_submit}});
}

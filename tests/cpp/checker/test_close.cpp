// close() while other threads submit and run operations, in all orders with few delays
// (checker/explorer.h). Every operation must end with a result or with GroupUnusable, and the
// worker must have ended. The threads of cpu/group/group.cpp are fibers here, and their locks and waits
// call the scheduler.
#include <pthread.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "checker/atomics.h"
#include "checker/clock.h"
#include "checker/explorer.h"
#include "checker/locks.h"
#include "cpu/group/group.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using checker::Violation;

struct Run {
  checker::Fibers fibers;
  checker::Locks locks{fibers};
  std::map<const void*, std::int64_t> notified;  // by condition variable: number of notifications
  // The thread that the group may start.
  void* (*worker)(void*) = nullptr;
  void* argument = nullptr;
  bool worker_ended = false;
  std::size_t users;  // threads that have not finished

  Run(checker::Fibers::Choice choice, std::size_t users)
      : fibers(std::move(choice)), users(users) {}
};
Run* run = nullptr;

void wait(const void* condition, const void* mutex) {
  const std::int64_t before = run->notified[condition];
  run->locks.wait(
      mutex, [=] { return run->notified[condition] != before; },
      [] { return "waits for a notification"; });
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
  Run mine(std::move(choice), users.size());
  run = &mine;
  checker::use_locks(&mine.locks);
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
  checker::use_locks(nullptr);
  run = nullptr;
}

void close_against_submit() {
  checker::Explorer explorer(3);
  while (explorer.next()) once(explorer.choice());
}

}  // namespace
}  // namespace pycomm::test

// Replaces the system's functions; mutexes are checker/locks.h's.
using pycomm::test::run;

extern "C" {
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

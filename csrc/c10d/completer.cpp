#include "c10d/completer.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace pycomm::c10d {
namespace {

constexpr auto kIdleFor = std::chrono::seconds(5);  // then a thread ends

// Leaked, because its threads may outlive static objects.
struct Pool {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::size_t idle = 0;

  void serve() {
    std::unique_lock lock(mutex);
    while (true) {
      ++idle;
      const bool busy = changed.wait_for(lock, kIdleFor, [&] { return !tasks.empty(); });
      --idle;
      if (!busy) return;
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }
};

Pool& pool() {
  static Pool* const made = new Pool;
  return *made;
}

}  // namespace

void complete_elsewhere(std::function<void()> task) {
  Pool& threads = pool();
  const std::lock_guard lock(threads.mutex);
  threads.tasks.push_back(std::move(task));
  if (threads.tasks.size() > threads.idle) std::thread([&threads] { threads.serve(); }).detach();
  threads.changed.notify_one();
}

}  // namespace pycomm::c10d

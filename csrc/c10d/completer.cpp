#include "c10d/completer.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace pycomm::c10d {
namespace {

constexpr auto kIdleFor = std::chrono::seconds(5);  // then a thread ends, unless it is the last
// At exit, the time for tasks to begin, and then for those that run to end.
constexpr auto kBeginWithin = std::chrono::milliseconds(500);
constexpr auto kEndWithin = std::chrono::seconds(5);
constexpr auto kLookEvery = std::chrono::milliseconds(2);

class Pool {
 public:
  void prepare() {
    const std::lock_guard lock(mutex_);
    if (threads_ > 0) return;
    try {
      start();
    } catch (const std::system_error& error) {
      throw std::runtime_error(std::string("no thread can be started (") + error.what() +
                               "): see ulimit -u, and the container's pids.max");
    }
  }

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
    if (tasks_.size() <= idle_) return;
    try {
      start();
    } catch (const std::system_error&) {  // the task waits for a busy thread
    }
  }

  void stop() {
    await(kBeginWithin, [&] { return operations == 0 && tasks_.empty() && idle_ == threads_; });
    std::unique_lock lock(mutex_);
    stopped_ = true;
    lock.unlock();
    await(kEndWithin, [&] { return idle_ == threads_; });
  }

  std::atomic<std::size_t> operations{0};

 private:
  template <class Over>
  void await(std::chrono::milliseconds patience, Over over) {
    const auto end = std::chrono::steady_clock::now() + patience;
    std::unique_lock lock(mutex_);
    while (!over() && std::chrono::steady_clock::now() < end) {
      lock.unlock();
      std::this_thread::sleep_for(kLookEvery);
      lock.lock();
    }
  }

  void start() {
    std::thread([this] { serve(); }).detach();
    ++threads_;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      const bool due =
          changed_.wait_for(lock, kIdleFor, [&] { return !tasks_.empty() && !stopped_; });
      --idle_;
      if (due) {
        std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        task = nullptr;  // without the lock: what it frees may wait for the interpreter
        lock.lock();
      } else if (threads_ > 1) {
        --threads_;
        return;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t threads_ = 0, idle_ = 0;
  bool stopped_ = false;
};

// Leaked, because its threads may outlive static objects.
Pool* pool = new Pool;

// The threads stay in the parent of a forked process, and one of them may have held the lock.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

void prepare_to_complete() { pool->prepare(); }

void complete_elsewhere(std::function<void()> task) { pool->add(std::move(task)); }

void stop_completing() { pool->stop(); }

Completing::Completing() { ++pool->operations; }
Completing::~Completing() { --pool->operations; }

}  // namespace pycomm::c10d

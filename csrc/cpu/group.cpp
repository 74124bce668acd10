#include "cpu/group.h"

#include <pthread.h>

#include <cstring>

#include "core/run.h"
#include "core/select.h"

namespace pycomm::cpu {
namespace {

// Counts the forks between the first process and this one.
std::atomic<unsigned> forks_so_far{0};

unsigned current_forks() {
  static const int registered = pthread_atfork(
      nullptr, nullptr, [] { forks_so_far.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return forks_so_far.load(std::memory_order_relaxed);
}

}  // namespace

bool Work::wait(Clock::duration patience) {
  std::unique_lock lock(mutex_);
  if (!done_.wait_for(lock, patience, [&] { return completed_; })) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

bool Work::completed() const {
  const std::lock_guard lock(mutex_);
  return completed_;
}

void Work::complete(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  completed_ = true;
  error_ = std::move(error);
  done_.notify_all();
}

Group::Group(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers, int rank,
             int size, Clock::duration timeout, std::uint32_t first_epoch)
    : rank_(rank),
      size_(size),
      forks_(current_forks()),
      window_(std::move(window)),
      heap_(std::make_shared<Heap>(window_, rank)),
      comm_(window_, std::move(peers), rank, size, timeout, first_epoch) {}

Group::~Group() {
  if (forked()) {
    // The parent's worker does not exist here, and the parent's group is not ours to leave.
    if (worker_.joinable()) worker_.detach();
  } else {
    close();
  }
}

bool Group::forked() const { return forks_ != forks_so_far.load(std::memory_order_relaxed); }

void Group::check_usable() {
  if (forked()) {
    throw GroupUnusable("group belongs to the parent of this forked process; make a new one here");
  }
  if (closed_.load(std::memory_order_acquire)) throw GroupUnusable("group is closed");
  if (failed_.load(std::memory_order_acquire)) {
    throw GroupUnusable("group has failed and must be made anew; the failure was: " + failure_);
  }
}

void Group::run(Operation operation, const void* input, void* output, void (*interrupt)()) {
  check_usable();
  if (pending_.load(std::memory_order_acquire) == 0) {
    const std::lock_guard lock(running_);
    execute(operation, input, output, interrupt);
    return;
  }
  const std::shared_ptr<Work> work = submit(operation, input, output);
  while (!work->wait(std::chrono::milliseconds(50))) {
    if (interrupt == nullptr) continue;
    try {
      interrupt();
    } catch (...) {
      // The worker must let go of the buffers before the caller frees them.
      abort();
      try {
        while (!work->wait(std::chrono::seconds(1))) continue;
      } catch (const std::exception&) {
      }
      throw;
    }
  }
}

std::shared_ptr<Work> Group::submit(Operation operation, const void* input, void* output) {
  check_usable();
  auto work = std::make_shared<Work>();
  const std::lock_guard lock(queue_mutex_);
  if (!worker_.joinable()) worker_ = std::thread([this] { serve(); });
  pending_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push_back({operation, input, output, work});
  queue_changed_.notify_one();
  return work;
}

void Group::serve() {
  while (true) {
    std::unique_lock lock(queue_mutex_);
    queue_changed_.wait(lock, [&] { return !queue_.empty() || closed_; });
    if (queue_.empty()) return;
    const Task task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();

    std::exception_ptr error;
    try {
      const std::lock_guard running(running_);
      execute(task.operation, task.input, task.output, nullptr);
    } catch (...) {
      error = std::current_exception();
    }
    // Before the work completes: who has waited for it may run the next operation inline.
    pending_.fetch_sub(1, std::memory_order_acq_rel);
    task.work->complete(std::move(error));
  }
}

void Group::execute(Operation operation, const void* input, void* output, void (*interrupt)()) {
  if (failed_.load(std::memory_order_acquire)) check_usable();
  if (size_ == 1) {
    copy_alone(operation, input, output);
    return;
  }
  if (operation.algorithm == Algorithm::automatic) {
    operation.algorithm =
        select_algorithm(operation.count * size_of(operation.dtype), size_, Device::cpu);
  }
  try {
    comm_.begin(operation, input, output, interrupt);
    pycomm::run(comm_, operation);
  } catch (const std::exception& error) {
    // A Mismatch is seen by all ranks at once; anything else must reach those who still wait.
    const auto* known = dynamic_cast<const CollectiveError*>(&error);
    if (known == nullptr) abort();
    failure_ = error.what();
    failed_.store(true, std::memory_order_release);
    throw;
  }
}

void Group::copy_alone(const Operation& operation, const void* input, void* output) {
  const std::int64_t bytes = operation.count * size_of(operation.dtype);
  if (input != output && bytes > 0) std::memcpy(output, input, static_cast<std::size_t>(bytes));
}

void Group::close() {
  if (closed_.exchange(true)) return;
  {
    const std::lock_guard lock(queue_mutex_);
    queue_changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  leave();
}

}  // namespace pycomm::cpu

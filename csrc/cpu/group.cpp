#include "cpu/group.h"

#include <cstring>

#include "core/run.h"
#include "core/select.h"
#include "cpu/fork.h"

namespace pycomm::cpu {
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
             int size, int cores, Clock::duration timeout, std::uint32_t first_epoch)
    : rank_(rank),
      size_(size),
      forks_(current_forks()),
      window_(std::move(window)),
      heap_(std::make_shared<Heap>(window_, rank)),
      comm_(window_, std::move(peers), rank, size, cores, timeout, first_epoch) {}

Group::~Group() { close(); }

bool Group::forked() const { return forks_ != current_forks(); }

void Group::abort() {
  if (!forked()) comm_.abort(Reason::aborted, rank_);
}

void Group::leave() {
  if (!forked()) comm_.leave();
}

void Group::check_usable() {
  if (forked()) {
    throw GroupUnusable("group belongs to the parent of this forked process; make a new one here");
  }
  if (closed_.load(std::memory_order_acquire)) throw GroupUnusable("group is closed");
  if (failed_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(failure_mutex_);
    throw GroupUnusable("group has failed and must be made anew; the failure was: " + failure_);
  }
}

void Group::run(Operation operation, const void* input, void* output, void (*interrupt)()) {
  run_in_order({operation, input, output, false, nullptr}, interrupt);
}

void Group::agree(const Operation& operation, void (*interrupt)()) {
  run_in_order({operation, nullptr, nullptr, true, nullptr}, interrupt);
}

std::shared_ptr<Work> Group::submit(Operation operation, const void* input, void* output) {
  check_usable();
  return enqueue({operation, input, output, false, nullptr});
}

// On this thread, unless something submitted earlier is still to come.
void Group::run_in_order(const Task& task, void (*interrupt)()) {
  check_usable();
  if (pending_.load(std::memory_order_acquire) == 0) {
    const std::lock_guard lock(running_);
    execute(task, interrupt);
  } else {
    await(*enqueue(task), interrupt);
  }
}

std::shared_ptr<Work> Group::enqueue(Task task) {
  task.work = std::make_shared<Work>();
  const std::lock_guard lock(queue_mutex_);
  if (!worker_.joinable()) worker_ = std::thread([this] { serve(); });
  pending_.fetch_add(1, std::memory_order_acq_rel);
  queue_.push_back(task);
  queue_changed_.notify_one();
  return task.work;
}

void Group::await(Work& work, void (*interrupt)()) {
  while (!work.wait(std::chrono::milliseconds(50))) {
    if (interrupt == nullptr) continue;
    try {
      interrupt();
    } catch (...) {
      // The worker must let go of the buffers before the caller frees them.
      abort();
      try {
        while (!work.wait(std::chrono::seconds(1))) continue;
      } catch (const std::exception&) {
      }
      throw;
    }
  }
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
      execute(task, nullptr);
    } catch (...) {
      error = std::current_exception();
    }
    // Before the work completes: who has waited for it may run the next operation inline.
    pending_.fetch_sub(1, std::memory_order_acq_rel);
    task.work->complete(std::move(error));
  }
}

void Group::execute(const Task& task, void (*interrupt)()) {
  if (failed_.load(std::memory_order_acquire)) check_usable();
  Operation operation = task.operation;
  if (operation.algorithm == Algorithm::automatic) {
    operation.algorithm =
        select_algorithm(operation.count * size_of(operation.dtype), size_, Device::cpu);
  }
  try {
    comm_.begin(operation, task.input, task.output, interrupt);
    if (size_ == 1) {
      if (!task.agree_only) copy_alone(operation, task.input, task.output);
    } else if (task.agree_only) {
      barrier(comm_);
    } else {
      pycomm::run(comm_, operation);
    }
  } catch (const std::exception& error) {
    // All ranks see a Mismatch, and the abort word tells of the rest; of an interrupt nobody knows
    // yet.
    if (dynamic_cast<const CollectiveError*>(&error) == nullptr) abort();
    fail(error.what());
    throw;
  }
}

void Group::fail(const std::string& why) {
  const std::lock_guard lock(failure_mutex_);
  if (!failed_) failure_ = why;
  failed_.store(true, std::memory_order_release);
}

void Group::copy_alone(const Operation& operation, const void* input, void* output) {
  const std::int64_t bytes = operation.count * size_of(operation.dtype);
  if (input != output && bytes > 0) std::memcpy(output, input, static_cast<std::size_t>(bytes));
}

void Group::close() {
  if (closed_.exchange(true)) return;
  if (forked()) return;  // the parent's membership is not ours to end
  {
    const std::lock_guard lock(queue_mutex_);
    queue_changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  const std::lock_guard lock(running_);  // another thread's operation ends first
  leave();
}

}  // namespace pycomm::cpu

#include "checker/locks.h"

#include <pthread.h>

#include <cerrno>

namespace pycomm::checker {
namespace {

Locks* used = nullptr;

}  // namespace

void use_locks(Locks* locks) { used = locks; }

void Locks::lock(const void* mutex) {
  fibers_.pause();
  fibers_.wait_until([=, this] { return !locked_[mutex]; }, [] { return "waits for a lock"; });
  locked_[mutex] = true;
  taken_(mutex);
}

bool Locks::try_lock(const void* mutex) {
  fibers_.pause();
  if (std::exchange(locked_[mutex], true)) return false;
  taken_(mutex);
  return true;
}

void Locks::give(const void* mutex) {
  given_(mutex);
  locked_[mutex] = false;
}

void Locks::unlock(const void* mutex) {
  give(mutex);
  fibers_.pause();
}

void Locks::wait(const void* mutex, std::function<bool()> condition,
                 std::function<std::string()> what) {
  give(mutex);
  fibers_.wait_until(std::move(condition), std::move(what));
  lock(mutex);
}

}  // namespace pycomm::checker

using pycomm::checker::used;

extern "C" {
int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (used != nullptr) used->lock(mutex);
  return 0;
}
int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  return used == nullptr || used->try_lock(mutex) ? 0 : EBUSY;
}
int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  if (used != nullptr) used->unlock(mutex);
  return 0;
}
}

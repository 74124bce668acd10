#include "cpu/fork.h"

#include <pthread.h>

#include <atomic>

namespace pycomm::cpu {
namespace {

std::atomic<unsigned> forks{0};

// Registered when the library is loaded, so that no fork is missed.
[[maybe_unused]] const int forks_counted =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

unsigned current_forks() { return forks.load(std::memory_order_relaxed); }

}  // namespace pycomm::cpu

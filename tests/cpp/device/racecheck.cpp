// order.h for ThreadSanitizer. Not instrumented, nor are device.cpp and streams.cpp: what they share is
// no synchronization of the kernels that they run.
//
// ThreadSanitizer knows neither scopes nor fences. Both are made of what it knows: fibers, and
// publishing and observing at an address.
//
//   Scopes. An operation synchronizes at one address per scope: the word itself stands for the system,
//   another address for each device. A release at system scope publishes at both, one at device scope
//   only at its device's. So ranks, which have a device each, do not meet there.
//
//   Fences. A fence before a relaxed store publishes what came before the fence, not what came before
//   the store. A fiber that never runs keeps that knowledge: it observes the actor at the fence, and
//   publishes at each later store. Another one observes at relaxed loads; the next fence hands its
//   knowledge to the actor.
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>

#include "order.h"

// As ThreadSanitizer's own interface has them; GCC does not install that header.
extern "C" {
std::uint32_t __tsan_atomic32_load(const volatile std::uint32_t*, int order);
std::uint64_t __tsan_atomic64_load(const volatile std::uint64_t*, int order);
void __tsan_atomic32_store(volatile std::uint32_t*, std::uint32_t, int order);
void __tsan_atomic64_store(volatile std::uint64_t*, std::uint64_t, int order);
int __tsan_atomic32_compare_exchange_strong(volatile std::uint32_t*, std::uint32_t* expected,
                                            std::uint32_t desired, int order, int order_of_failure);
}

namespace device {

struct Actor {
  void* fiber = nullptr;
  // By scope; made when they are needed.
  void* at_fence[2] = {};
  void* at_loads[2] = {};
  std::uint64_t handover = 0;  // its address
};

namespace {

constexpr unsigned kNoSync = __tsan_switch_to_fiber_no_sync;

thread_local Actor* current = nullptr;
thread_local Actor own;  // this system thread's

// Publishes or observes as a fiber that keeps knowledge.
template <class Step>
void as(void* fiber, Step step) {
  __tsan_switch_to_fiber(fiber, kNoSync);
  step();
  __tsan_switch_to_fiber(current->fiber, kNoSync);
}

// The words that were released, and an address for each of their scopes. Nobody is ordered by its lock,
// of which ThreadSanitizer knows nothing.
struct Released {
  const void* word;
  int domain;  // a device, or kSystem
  std::uint64_t place;
};
constexpr int kSystem = -1;
constexpr std::size_t kReleased = 1 << 16;
Released released[kReleased];
char lock = 0;

const void* find(const void* word, int domain, bool insert) {
  while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {
  }
  std::size_t at =
      (reinterpret_cast<std::uintptr_t>(word) / 4 * 8 + static_cast<std::size_t>(domain + 1)) *
          0x9e3779b97f4a7c15u >>
      48;
  const std::size_t first = at;
  while (released[at].word != nullptr &&
         (released[at].word != word || released[at].domain != domain)) {
    at = (at + 1) % kReleased;
    if (at == first) {
      std::fprintf(stderr, "too many words are released\n");
      std::abort();
    }
  }
  const bool found = released[at].word != nullptr;
  if (!found && insert) released[at] = {word, domain, 0};
  __atomic_clear(&lock, __ATOMIC_RELEASE);
  if (!found && !insert) return nullptr;
  return domain == kSystem ? word : &released[at].place;
}

int domain_of(int scope) {
  return static_cast<Scope>(scope) == Scope::system ? kSystem : current_device();
}

// Where an operation publishes and observes: at its device's address, and at the system's if that is its
// scope.
template <class Visit>
void for_scopes(Scope scope, Visit visit) {
  visit(static_cast<int>(Scope::device));
  if (scope == Scope::system) visit(static_cast<int>(Scope::system));
}

void after_load(const void* word, int order, Scope scope) {
  for_scopes(scope, [&](int s) {
    // The host may have released it as well, of which ThreadSanitizer knows.
    const bool by_host = order != __ATOMIC_RELAXED && static_cast<Scope>(s) == Scope::system;
    const void* const place = by_host ? word : find(word, domain_of(s), false);
    if (place == nullptr) return;
    if (order != __ATOMIC_RELAXED) return observe(place);
    void*& keeper = current->at_loads[s];
    if (keeper == nullptr) keeper = __tsan_create_fiber(0);
    as(keeper, [&] { observe(place); });
  });
}

void before_store(const void* word, int order, Scope scope) {
  for_scopes(scope, [&](int s) {
    if (order != __ATOMIC_RELAXED) return publish(find(word, domain_of(s), true));
    void* const keeper = current->at_fence[s];
    if (keeper == nullptr) return;
    const void* const place = find(word, domain_of(s), true);
    as(keeper, [&] { publish(place); });
  });
}

}  // namespace

Actor* make_actor() { return new Actor{__tsan_create_fiber(0)}; }

Actor* current_actor() {
  if (current == nullptr) {
    own.fiber = __tsan_get_current_fiber();
    current = &own;
  }
  return current;
}

Actor* become(Actor* next) {
  Actor* const before = current_actor();
  current = next;
  __tsan_switch_to_fiber(next->fiber, kNoSync);
  return before;
}

void publish(const void* place) { __tsan_release(const_cast<void*>(place)); }
void observe(const void* place) { __tsan_acquire(const_cast<void*>(place)); }

// To ThreadSanitizer all these accesses are atomic and relaxed.
template <class Word>
Word load(const Word* word, int order, Scope scope) {
  Word value;
  if constexpr (sizeof(Word) == 4) {
    value = __tsan_atomic32_load(word, __ATOMIC_RELAXED);
  } else {
    value = __tsan_atomic64_load(word, __ATOMIC_RELAXED);
  }
  after_load(word, order, scope);
  return value;
}
template <class Word>
void store(Word* word, Word value, int order, Scope scope) {
  before_store(word, order, scope);
  if constexpr (sizeof(Word) == 4) {
    __tsan_atomic32_store(word, value, __ATOMIC_RELAXED);
  } else {
    __tsan_atomic64_store(word, value, __ATOMIC_RELAXED);
  }
}
template std::uint32_t load(const std::uint32_t*, int, Scope);
template std::uint64_t load(const std::uint64_t*, int, Scope);
template void store(std::uint32_t*, std::uint32_t, int, Scope);
template void store(std::uint64_t*, std::uint64_t, int, Scope);

unsigned compare_exchange(unsigned* word, unsigned expected, unsigned desired) {
  before_store(word, __ATOMIC_RELAXED, Scope::device);
  __tsan_atomic32_compare_exchange_strong(word, &expected, desired, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED);
  after_load(word, __ATOMIC_RELAXED, Scope::device);
  return expected;
}

void fence(Scope scope) {
  for_scopes(scope, [](int s) {
    if (void* const keeper = current->at_loads[s]; keeper != nullptr) {
      as(keeper, [] { publish(&current->handover); });
      observe(&current->handover);
    }
  });
  for_scopes(scope, [](int s) {
    void*& keeper = current->at_fence[s];
    if (keeper == nullptr) keeper = __tsan_create_fiber(0);
    publish(&current->handover);
    as(keeper, [] { observe(&current->handover); });
  });
}

}  // namespace device

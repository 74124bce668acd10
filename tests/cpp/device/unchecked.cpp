// order.h for tests that do not look for races: the processor's own order is stronger than CUDA's. Only
// relaxed loads can be as late as CUDA allows.
#include <array>
#include <atomic>
#include <random>
#include <utility>

#include "../support/dice.h"
#include "order.h"

namespace device {

namespace {

std::atomic<bool> late = false;

thread_local Actor* current = nullptr;

}  // namespace

struct Actor {
  // A word as the thread has seen it, which it may see until it has loaded as often as `until` says.
  struct Seen {
    const void* word = nullptr;
    std::uint64_t value = 0;
    unsigned until = 0;
  };

  std::array<Seen, 4> seen{};
  unsigned loads = 0;

  Seen& of(const void* word) { return seen[reinterpret_cast<std::uintptr_t>(word) / 4 % 4]; }
};

namespace {

void forget() {
  if (current != nullptr && late) current->seen = {};
}

template <class Word>
Word load_late(const Word* word) {
  thread_local pycomm::test::Dice random(std::random_device{}());
  constexpr unsigned kLatest = 400;
  ++current->loads;
  Actor::Seen& seen = current->of(word);
  if (seen.word != word || current->loads >= seen.until) {
    const auto later = static_cast<unsigned>(random() % kLatest);
    seen = {word, __atomic_load_n(word, __ATOMIC_RELAXED), current->loads + later};
  }
  return static_cast<Word>(seen.value);
}

}  // namespace

void let_loads_be_late(bool may_be) { late = may_be; }

Actor* make_actor() { return new Actor; }
Actor* current_actor() { return current; }
Actor* become(Actor* next) { return std::exchange(current, next); }
void publish(const void*) {}
void observe(const void*) { forget(); }

template <class Word>
Word load(const Word* word, int order, Scope) {
  if (order != __ATOMIC_RELAXED) forget();
  if (order == __ATOMIC_RELAXED && current != nullptr && late) return load_late(word);
  return __atomic_load_n(word, order);
}
template <class Word>
void store(Word* word, Word value, int order, Scope) {
  if (current != nullptr && late) current->of(word) = {};
  __atomic_store_n(word, value, order);
}
template std::uint32_t load(const std::uint32_t*, int, Scope);
template std::uint64_t load(const std::uint64_t*, int, Scope);
template void store(std::uint32_t*, std::uint32_t, int, Scope);
template void store(std::uint64_t*, std::uint64_t, int, Scope);

unsigned compare_exchange(unsigned* word, unsigned expected, unsigned desired) {
  if (current != nullptr && late) current->of(word) = {};
  __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

void fence(Scope) {
  forget();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace device

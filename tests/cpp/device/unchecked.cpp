// order.h for tests that do not look for races: the processor's own order is stronger than CUDA's.
#include "order.h"

namespace device {

Actor* make_actor() { return nullptr; }
Actor* current_actor() { return nullptr; }
Actor* become(Actor*) { return nullptr; }
void publish(const void*) {}
void observe(const void*) {}

template <class Word>
Word load(const Word* word, int order, Scope) {
  return __atomic_load_n(word, order);
}
template <class Word>
void store(Word* word, Word value, int order, Scope) {
  __atomic_store_n(word, value, order);
}
template std::uint32_t load(const std::uint32_t*, int, Scope);
template std::uint64_t load(const std::uint64_t*, int, Scope);
template void store(std::uint32_t*, std::uint32_t, int, Scope);
template void store(std::uint64_t*, std::uint64_t, int, Scope);

unsigned compare_exchange(unsigned* word, unsigned expected, unsigned desired) {
  __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

void fence(Scope) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace device

// What orders memory accesses on a device. racecheck.cpp tells ThreadSanitizer what CUDA promises, and
// no more; tests that do not look for races have unchecked.cpp in its place.
#pragma once

#include <cstdint>

namespace device {

// How far an atomic operation or a fence orders: among the threads of its device, or among all.
enum class Scope { device, system };

// What ThreadSanitizer takes for a thread: a thread of a kernel, a stream, or a thread of the host.
struct Actor;
Actor* make_actor();
Actor* current_actor();
// From now on, this system thread does the work of another actor. This orders nothing. Returns the
// actor before.
Actor* become(Actor* next);

// What the current actor has done until publish() happens before what another one does after
// observe() of the same address.
void publish(const void* place);
void observe(const void* place);

// From now on, a relaxed load may return what its thread has seen there before, as long as the thread
// passes no acquire, fence or barrier. Only in tests that do not look for races.
void let_loads_be_late(bool may_be);

// Atomic operations and fences of the current actor. `order` is one of __ATOMIC_RELAXED and so on.
template <class Word>
Word load(const Word* word, int order, Scope scope);
template <class Word>
void store(Word* word, Word value, int order, Scope scope);
// Relaxed, at the scope of a device. Returns the value before.
unsigned compare_exchange(unsigned* word, unsigned expected, unsigned desired);
void fence(Scope scope);

// The device of this system thread.
int current_device();
void set_device(int device);

}  // namespace device

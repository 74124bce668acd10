#include "checker/atomics.h"

#include <cstdint>
#include <map>
#include <utility>

namespace pycomm::checker {
namespace {

struct LateStore {
  const volatile void* address = nullptr;
  std::function<void()> store;
};

const AtomicsObserver* observer = nullptr;
std::map<std::size_t, LateStore> late;  // by thread; the thread's next store makes it visible

bool observed(const volatile void* address) {
  return observer != nullptr && observer->observes(address);
}

template <class T>
T load(const volatile T* address, int order) {
  const bool is_observed = observed(address);
  if (is_observed) {
    observer->before_read(address);
    if (late[observer->thread()].address == address) finish_store();
  }
  const T value = __atomic_load_n(address, __ATOMIC_SEQ_CST);
  if (is_observed && observer->loaded) observer->loaded(address, order);
  if (is_observed) observer->after_read(address);
  return value;
}

template <class T>
void store(volatile T* address, T value, int order) {
  const auto make_visible = [=] { __atomic_store_n(address, value, __ATOMIC_SEQ_CST); };
  if (!observed(address)) return make_visible();
  observer->before_write(address);
  if (observer->stores) observer->stores(address, order);
  finish_store();
  late[observer->thread()] = {address, make_visible};
  if (!observer->late_stores || order == __ATOMIC_SEQ_CST) finish_store();
}

// An atomic read-modify-write.
template <class Change>
auto change(const volatile void* address, int order, Change change) {
  const bool is_observed = observed(address);
  if (is_observed) {
    observer->before_write(address);
    if (observer->stores) observer->stores(address, order);
    finish_store();
  }
  const auto before = change();
  if (is_observed) observer->after_write(address);
  return before;
}

}  // namespace

void observe_atomics(const AtomicsObserver* next) {
  observer = next;
  late.clear();
}

void finish_store() {
  const LateStore mine = std::exchange(late[observer->thread()], {});
  if (mine.address == nullptr) return;
  mine.store();
  observer->after_write(mine.address);
}

}  // namespace pycomm::checker

// The functions that GCC and Clang call. Plain accesses need no tracking.
using pycomm::checker::change;
using pycomm::checker::load;
using pycomm::checker::store;

#define CHANGE(bits, T, name, builtin)                                                        \
  T __tsan_atomic##bits##_##name(volatile T* address, T value, int order) {                   \
    return change(address, order, [=] { return builtin(address, value, __ATOMIC_SEQ_CST); }); \
  }
#define COMPARE_EXCHANGE(bits, T, name)                                                          \
  bool __tsan_atomic##bits##_##name(volatile T* address, T* expected, T value, int order, int) { \
    return change(address, order, [=] {                                                          \
      return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,      \
                                         __ATOMIC_SEQ_CST);                                      \
    });                                                                                          \
  }
#define ATOMICS(bits, T)                                                      \
  T __tsan_atomic##bits##_load(const volatile T* address, int order) {        \
    return load(address, order);                                              \
  }                                                                           \
  void __tsan_atomic##bits##_store(volatile T* address, T value, int order) { \
    store(address, value, order);                                             \
  }                                                                           \
  CHANGE(bits, T, exchange, __atomic_exchange_n)                              \
  CHANGE(bits, T, fetch_add, __atomic_fetch_add)                              \
  CHANGE(bits, T, fetch_sub, __atomic_fetch_sub)                              \
  CHANGE(bits, T, fetch_or, __atomic_fetch_or)                                \
  CHANGE(bits, T, fetch_and, __atomic_fetch_and)                              \
  COMPARE_EXCHANGE(bits, T, compare_exchange_strong)                          \
  COMPARE_EXCHANGE(bits, T, compare_exchange_weak)
#define PLAIN(bytes)                          \
  void __tsan_read##bytes(void*) {}           \
  void __tsan_write##bytes(void*) {}          \
  void __tsan_unaligned_read##bytes(void*) {} \
  void __tsan_unaligned_write##bytes(void*) {}

extern "C" {
ATOMICS(8, std::uint8_t)
ATOMICS(16, std::uint16_t)
ATOMICS(32, std::uint32_t)
ATOMICS(64, std::uint64_t)
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
void __tsan_read_range(void*, unsigned long) {}
void __tsan_write_range(void*, unsigned long) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

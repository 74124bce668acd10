#include "cpu/observe/ticks.h"

#include <algorithm>
#include <chrono>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pycomm::cpu {
namespace {

bool find_steady_counter() {
#if defined(__x86_64__)
  // Intel SDM 3B, 19.17.1; AMD APM 3, E.4.7: the counter runs at one speed in all states.
  constexpr unsigned kPowerManagement = 0x80000007, kInvariant = 1u << 8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(kPowerManagement, &a, &b, &c, &d) != 0 && (d & kInvariant) != 0;
#else
  return true;
#endif
}

struct Moment {
  std::int64_t tick;
  Clock::time_point time;
};

// The quickest of three, because this thread may lose its core between the two readings.
Moment moment() {
  Moment best{};
  std::int64_t least = 0;
  for (int i = 0; i < 3; ++i) {
    const std::int64_t before = ticks();
    const Clock::time_point time = Clock::now();
    const std::int64_t taken = ticks() - before;
    if (i == 0 || taken < least) best = {before + taken / 2, time};
    least = i == 0 ? taken : std::min(least, taken);
  }
  return best;
}

double seconds_of(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

const bool counter_is_steady = find_steady_counter();

namespace {
const Moment first = moment();
}

TickScale TickScale::now() {
  std::this_thread::sleep_until(first.time + std::chrono::milliseconds(20));
  const Moment here = moment();
  return {here.tick, seconds_of(here.time.time_since_epoch()),
          seconds_of(here.time - first.time) / static_cast<double>(here.tick - first.tick)};
}

}  // namespace pycomm::cpu

// A futex in shared memory. A rank that has been waiting for a while sleeps on it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace pycomm::cpu {

// Zero-initialised. Only threads of the owner sleep on it, and all wake up; any rank may ring.
class Bell {
 public:
  std::uint32_t rung() const { return rung_.load(); }
  // Sleeps until the bell has rung after `rung` was read, until a signal arrives, or for at most
  // `most`.
  void sleep(std::uint32_t rung, std::chrono::nanoseconds most) {
    const timespec time{static_cast<time_t>(most.count() / 1'000'000'000),
                        static_cast<long>(most.count() % 1'000'000'000)};
    call(FUTEX_WAIT, rung, &time);
  }
  void ring() {
    rung_.fetch_add(1);
    call(FUTEX_WAKE, INT_MAX, nullptr);
  }

 private:
  void call(int operation, std::uint32_t value, const timespec* time) {
    static_assert(sizeof(rung_) == sizeof(std::uint32_t));
    (void)syscall(SYS_futex, &rung_, operation, value, time, nullptr, 0);
  }

  std::atomic<std::uint32_t> rung_;
};

}  // namespace pycomm::cpu

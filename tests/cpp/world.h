// A world of ranks that are threads.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/group.h"
#include "run_all.h"

namespace pycomm::test {

class World {
 public:
  explicit World(int size, std::int64_t staging_bytes = 64 << 10, std::uint32_t first_epoch = 0,
                 double timeout_seconds = 60) {
    constexpr std::int64_t kSlice = 1 << 30;
    const int fd = cpu::Window::create(size, kSlice, staging_bytes);
    const auto window = std::make_shared<cpu::Window>(fd, size, kSlice, staging_bytes);
    const auto peers = std::make_shared<const cpu::Liveness>(std::vector<int>(size, 0),
                                                             std::vector<int>(size, -1));
    const auto timeout = std::chrono::duration_cast<cpu::Clock::duration>(
        std::chrono::duration<double>(timeout_seconds));
    for (int r = 0; r < size; ++r) {
      groups_.push_back(
          std::make_unique<cpu::Group>(window, peers, r, size, 2, timeout, first_epoch));
    }
  }

  cpu::Group& operator[](int r) { return *groups_[static_cast<std::size_t>(r)]; }
  int size() const { return static_cast<int>(groups_.size()); }

  // Runs body(rank) on a thread per rank; rethrows the first exception.
  void run(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    std::mutex mutex;
    std::exception_ptr first;
    for (int r = 0; r < size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
          groups_[static_cast<std::size_t>(r)]->leave();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
  }

 private:
  std::vector<std::unique_ptr<cpu::Group>> groups_;
};

}  // namespace pycomm::test

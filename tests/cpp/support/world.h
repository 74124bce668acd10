// A group of ranks that are threads.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/group/group.h"
#include "support/run_all.h"

namespace pycomm::test {

// Ranks that are threads, without processes to watch.
inline std::shared_ptr<const cpu::Liveness> threads(int size) {
  const auto count = static_cast<std::size_t>(size);
  return std::make_shared<const cpu::Liveness>(std::vector<int>(count),
                                               std::vector<std::shared_ptr<cpu::Process>>(count));
}

inline Operation all_reduce_of(std::int64_t count) {
  Operation operation{};
  operation.collective = Collective::all_reduce;
  operation.dtype = DType::f32;
  operation.op = ReduceOp::sum;
  operation.count = count;
  return operation;
}

class World {
 public:
  explicit World(int size, std::int64_t staging_bytes = 64 << 10, std::uint32_t first_epoch = 0,
                 double timeout_seconds = 60) {
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    add_node(ranks, size, staging_bytes, first_epoch, duration(timeout_seconds));
  }

  // Simulated nodes with these numbers of ranks.
  explicit World(const std::vector<int>& ranks_per_node, std::int64_t staging_bytes = 64 << 10) {
    pycomm::Nodes nodes;
    int next = 0;
    for (const int count : ranks_per_node) {
      nodes.ranks.emplace_back();
      for (int i = 0; i < count; ++i) nodes.ranks.back().push_back(next++);
    }
    for (const auto& ranks : nodes.ranks) {
      add_node(ranks, next, staging_bytes, 0, duration(60));
    }
    std::vector<std::vector<std::shared_ptr<cpu::LocalTransport>>> stripes;
    for (int s = 0; s < nodes.stripes(); ++s) {
      stripes.push_back(cpu::LocalTransport::make(nodes.count()));
    }
    std::vector<std::shared_ptr<cpu::p2p::Port>> ports;
    std::vector<cpu::p2p::Port::Address> addresses;
    for (int r = 0; r < next; ++r) {
      ports.push_back(std::make_shared<cpu::p2p::Port>("127.0.0.1"));
      addresses.push_back(ports.back()->address());
    }
    for (int m = 0; m < nodes.count(); ++m) {
      nodes.here = m;
      for (int i = 0; i < nodes.size(m); ++i) {
        const auto index = static_cast<std::size_t>(i);
        const auto transport =
            index < stripes.size() ? stripes[index][static_cast<std::size_t>(m)] : nullptr;
        const int rank = nodes.rank(m, i);
        const auto port = ports[static_cast<std::size_t>(rank)];
        port->meet(addresses);
        (*this)[rank].span(nodes, transport, port, duration(60));
      }
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
  static cpu::Clock::duration duration(double seconds) {
    return std::chrono::duration_cast<cpu::Clock::duration>(std::chrono::duration<double>(seconds));
  }

  void add_node(const std::vector<int>& ranks, int world, std::int64_t staging_bytes,
                std::uint32_t first_epoch, cpu::Clock::duration timeout) {
    constexpr std::int64_t kSlice = 1 << 30;
    const int size = static_cast<int>(ranks.size());
    const int fd = cpu::Window::create(size, kSlice, staging_bytes);
    const auto window = std::make_shared<cpu::Window>(fd, size, kSlice, staging_bytes);
    const auto peers = std::make_shared<const cpu::Liveness>(
        std::vector<int>(static_cast<std::size_t>(world), 0),
        std::vector<std::shared_ptr<cpu::Process>>(ranks.size()), ranks);
    for (int r = 0; r < size; ++r) {
      groups_.push_back(
          std::make_unique<cpu::Group>(window, peers, r, size, 2, timeout, first_epoch));
    }
  }

  std::vector<std::unique_ptr<cpu::Group>> groups_;
};

}  // namespace pycomm::test

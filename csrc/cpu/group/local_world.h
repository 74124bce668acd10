// Groups whose ranks are threads of this process, as pycomm.LocalWorld in Python:
//
//   cpu::LocalWorld world(4);
//   world.run([&](int rank) { world[rank].run(operation, inputs[rank], outputs[rank]); });
#pragma once

#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/timeout.h"
#include "cpu/group/group.h"
#include "cpu/internode/transport.h"
#include "cpu/p2p/port.h"

namespace pycomm::cpu {

struct LocalOptions {
  std::int64_t staging_bytes = 2 << 20;  // shared memory per rank, for tensors outside of windows
  double timeout = 300;                  // in seconds, for each wait for another rank
  std::uint32_t first_epoch = 0;         // the number after which operations are counted
};

class LocalWorld {
 public:
  explicit LocalWorld(int ranks, const LocalOptions& options = {})
      : LocalWorld(std::vector<int>{ranks}, options) {}

  // Emulates nodes, with these numbers of ranks. The bits of results are those of real nodes.
  explicit LocalWorld(const std::vector<int>& ranks_per_node, const LocalOptions& options = {}) {
    Nodes nodes;
    int world = 0;
    for (const int count : ranks_per_node) {
      PYCOMM_CHECK(count > 0, "a world must have ranks on each node, got " + std::to_string(count));
      nodes.ranks.emplace_back();
      for (int i = 0; i < count; ++i) nodes.ranks.back().push_back(world++);
    }
    for (const auto& ranks : nodes.ranks) add_node(ranks, world, options);
    if (nodes.count() > 1) connect(nodes, timeout_of(options.timeout));
  }

  int size() const { return static_cast<int>(groups_.size()); }
  Group& operator[](int rank) { return *groups_[static_cast<std::size_t>(rank)]; }

  // Calls body(rank) on a thread per rank, and returns when all have ended. If a rank throws, the
  // others raise PeerDied in operations that need it, and run() throws the first exception.
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
          (*this)[r].leave();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
  }

 private:
  void add_node(const std::vector<int>& ranks, int world, const LocalOptions& options) {
    const int size = static_cast<int>(ranks.size());
    const int fd = Window::create(size, slice_bytes(), options.staging_bytes);
    const auto window = std::make_shared<Window>(fd, size, slice_bytes(), options.staging_bytes);
    const auto peers = std::make_shared<const Liveness>(
        std::vector<int>(static_cast<std::size_t>(world), getpid()),
        std::vector<std::shared_ptr<Process>>(ranks.size()), ranks);
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    for (int r = 0; r < size; ++r) {
      groups_.push_back(std::make_unique<Group>(window, peers, r, size, cores,
                                                timeout_of(options.timeout), options.first_epoch));
    }
  }

  void connect(Nodes& nodes, Clock::duration timeout) {
    std::vector<std::vector<std::shared_ptr<LocalTransport>>> stripes;
    for (int s = 0; s < nodes.stripes(); ++s) {
      stripes.push_back(LocalTransport::make(nodes.count()));
    }
    std::vector<std::shared_ptr<p2p::Port>> ports;
    std::vector<p2p::Port::Address> addresses;
    for (int r = 0; r < size(); ++r) {
      ports.push_back(std::make_shared<p2p::Port>("127.0.0.1"));
      addresses.push_back(ports.back()->address());
    }
    for (nodes.here = 0; nodes.here < nodes.count(); ++nodes.here) {
      for (int i = 0; i < nodes.size(nodes.here); ++i) {
        const auto stripe = static_cast<std::size_t>(i);
        const auto transport = stripe < stripes.size()
                                   ? stripes[stripe][static_cast<std::size_t>(nodes.here)]
                                   : nullptr;
        const int rank = nodes.rank(nodes.here, i);
        const auto port = ports[static_cast<std::size_t>(rank)];
        port->meet(addresses);
        (*this)[rank].span(nodes, transport, port, timeout);
      }
    }
  }

  // As much as the node has memory, so that every tensor fits into a window. Pages that nobody uses
  // take none.
  static std::int64_t slice_bytes() {
    return round_up(static_cast<std::int64_t>(sysconf(_SC_PAGE_SIZE)) * sysconf(_SC_PHYS_PAGES),
                    std::int64_t{1} << 30);
  }

  std::vector<std::unique_ptr<Group>> groups_;
};

}  // namespace pycomm::cpu

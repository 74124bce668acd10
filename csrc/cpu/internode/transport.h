// What carries bytes between nodes, between the ranks that carry one stripe: one of each node.
// Here the interface, and the transport between nodes that are imagined within one process; the one
// over torch.distributed is Python's (pycomm/_runtime/internode.py).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "core/message.h"
#include "cpu/store_policy.h"

namespace pycomm::cpu {

// Memory on its way to a node, or from it.
struct Transfer {
  int node;
  std::byte* data;
  std::int64_t bytes;
};

// Transfers that are posted together.
struct Batch {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
};

class Transport {
 public:
  // `secret`: what all messages of this stripe carry.
  explicit Transport(const Secret& secret = {}) : secret_(secret) {}
  virtual ~Transport() = default;

  const Secret& secret() const { return secret_; }

  // Starts a batch. What a node sends to another, in the order of its batches, is what that one
  // receives from it, in the order of its own, and equally long.
  virtual void post(const Batch& batch) = 0;
  // Gives the other nodes a Farewell that says why this one stops.
  virtual void stop(std::span<const std::byte> farewell) = 0;
  // Lets go of all memory.
  virtual void disconnect() = 0;
  // Gives them one that says that no batch will follow.
  virtual void leave(std::span<const std::byte> farewell) = 0;

  // Whether the first `batches` batches have completed; waits for that a while.
  bool wait(std::int64_t batches, Clock::duration patience);
  // A node for which the oldest batch waits, or -1.
  virtual int awaited() const = 0;
  // Whether nothing more will come from a node.
  bool lost(int node) const;
  // Waits a while for the last words of so many other nodes.
  void wait_for_farewells(int nodes, Clock::duration patience);

  // For implementations, from any thread. One more batch has completed.
  void complete();
  void lose(int node);
  // A node has said farewell, or is lost and will not.
  void finished(int node);
  // Another node's farewell has come: bytes that nobody has looked at.
  void heard(int node, std::span<const std::byte> farewell);
  // Who wants to know of farewells, also of earlier ones; nobody, with an empty function.
  using Listener = std::function<void(int node, std::span<const std::byte> farewell)>;
  void listen(Listener listener);

 private:
  const Secret secret_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t completed_ = 0;
  std::set<int> lost_, ended_;
  std::mutex listener_mutex_;
  Listener listener_;
  std::map<int, std::vector<std::byte>> farewells_;
};

// One stripe's nodes, all in this process. A transfer is copied by whoever comes second.
class LocalTransport : public Transport {
 public:
  // Their transports, in the order of nodes.
  static std::vector<std::shared_ptr<LocalTransport>> make(int nodes);

  void post(const Batch& batch) override;
  void stop(std::span<const std::byte> farewell) override;
  void disconnect() override;
  void leave(std::span<const std::byte> farewell) override;
  int awaited() const override;

 private:
  struct Waiting {
    Transfer transfer;
    std::int64_t batch;
  };
  struct Shared {
    std::mutex mutex;
    std::vector<std::weak_ptr<LocalTransport>> ends;
    // By sender and receiver.
    std::map<std::pair<int, int>, std::deque<Waiting>> sends, receives;
  };

  LocalTransport(std::shared_ptr<Shared> shared, int node)
      : shared_(std::move(shared)), node_(node) {}
  bool match(std::deque<Waiting>& others, const Transfer& transfer, bool sending);
  void finish(std::int64_t batch);
  template <class Tell>
  void tell_others(Tell tell);

  std::shared_ptr<Shared> shared_;
  const int node_;
  bool connected_ = true;
  std::deque<std::int64_t> missing_;  // transfers, of the batches that have not completed
  std::int64_t first_ = 0;            // the number of the first of these
};

}  // namespace pycomm::cpu

// Transport of bytes between the ranks that carry one stripe, one rank per node. This file has the
// interface, and a transport between simulated nodes within one process. The transport over
// torch.distributed is in Python (pycomm/_runtime/internode.py).
#pragma once

#include <chrono>
#include <compare>
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
#include "cpu/executor/store_policy.h"

namespace pycomm::cpu {

// How often a wait between nodes checks whether it should end.
inline constexpr auto kLook = std::chrono::milliseconds(20);

// Memory to send to a node or to receive from it.
struct Transfer {
  int node;
  std::byte* data;
  std::int64_t bytes;
};

// Transfers that are started together.
struct Batch {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
};

class Transport {
 public:
  // `secret` is part of all messages of this stripe.
  explicit Transport(const Secret& secret = {}) : secret_(secret) {}
  virtual ~Transport() = default;

  const Secret& secret() const { return secret_; }

  // Starts a batch. A node's sends to another node, in the order of its batches, match that node's
  // receives from it, in the order of its own batches; sizes must be equal.
  virtual void post(const Batch& batch) = 0;
  // Sends the other nodes a Farewell with the reason why this node stops.
  virtual void stop(std::span<const std::byte> farewell) = 0;
  // Stops using the memory of all posted transfers.
  virtual void disconnect() = 0;
  // Sends the other nodes a Farewell that says that no batch will follow.
  virtual void leave(std::span<const std::byte> farewell) = 0;

  // Returns true if the first `batches` batches have completed. Waits up to `patience` for that.
  bool wait(std::int64_t batches, Clock::duration patience);
  // A node that the oldest batch waits for, or -1 if that is not known.
  virtual int awaited() const = 0;
  // True if nothing more will arrive from a node.
  bool lost(int node) const;
  // True if the oldest batch can never complete because of this node, which has died: nothing more
  // will arrive from it, not even a farewell.
  bool died(int node) const;
  // Waits up to `patience` until these nodes have sent farewells or are lost.
  void wait_for_farewells(const std::set<int>& nodes, Clock::duration patience);

  // The following functions are for implementations, which may call them from any thread.
  // complete(): one more batch has completed. lose(): nothing more will arrive from a node.
  // fail(): nor will the oldest batch ever complete, because of this node.
  void complete();
  void lose(int node);
  void fail(int node);
  // A node has sent its farewell, or is lost and will send none.
  void finished(int node);
  // Another node's farewell has arrived. Its bytes have not been checked.
  void heard(int node, std::span<const std::byte> farewell);
  // Sets the function that receives farewells, including those that arrived earlier. An empty
  // function stops listening.
  using Listener = std::function<void(int node, std::span<const std::byte> farewell)>;
  void listen(Listener listener);

 private:
  const Secret secret_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t completed_ = 0;
  std::set<int> lost_, ended_;
  int failed_ = -1;
  mutable std::mutex listener_mutex_;
  Listener listener_;
  std::map<int, std::vector<std::byte>> farewells_;
};

// The transport of one stripe between nodes that are all in this process. The second of two
// matching transfers copies the data.
class LocalTransport : public Transport {
 public:
  // One transport per node, in node order.
  static std::vector<std::shared_ptr<LocalTransport>> make(int nodes);

  void post(const Batch& batch) override;
  void stop(std::span<const std::byte> farewell) override;
  void disconnect() override;
  void leave(std::span<const std::byte> farewell) override;
  int awaited() const override;

 private:
  struct Way {
    int from, to;
    std::int64_t bytes;
    auto operator<=>(const Way&) const = default;
  };
  struct Waiting {
    Transfer transfer;
    std::int64_t batch;
  };
  struct Shared {
    std::mutex mutex;
    std::vector<std::weak_ptr<LocalTransport>> ends;
    // Transfers that wait for their counterparts. As over Gloo, a message of another length matches
    // none: nodes that disagree find that out by their handshakes.
    std::map<Way, std::deque<Waiting>> sends, receives;
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
  std::deque<std::int64_t> missing_;  // open transfers of each incomplete batch
  std::int64_t first_ = 0;            // number of the first of these batches
};

}  // namespace pycomm::cpu

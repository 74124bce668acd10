// What carries bytes between machines, between the ranks that carry one stripe: one of each machine.
// Here the interface, and the transport between machines that are imagined within one process; the one
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

// Memory on its way to a machine, or from it.
struct Parcel {
  int host;
  std::byte* data;
  std::int64_t bytes;
};

// Parcels that are posted together.
struct Round {
  std::vector<Parcel> sends;
  std::vector<Parcel> receives;
};

class Transport {
 public:
  // `secret`: what all messages of this stripe carry.
  explicit Transport(const Secret& secret = {}) : secret_(secret) {}
  virtual ~Transport() = default;

  const Secret& secret() const { return secret_; }

  // Starts a round. What a machine sends to another, in the order of its rounds, is what that one
  // receives from it, in the order of its own, and equally long.
  virtual void post(const Round& round) = 0;
  // Gives the other machines a Farewell that says why this one stops.
  virtual void stop(std::span<const std::byte> farewell) = 0;
  // Lets go of all memory.
  virtual void disconnect() = 0;
  // Gives them one that says that no round will follow.
  virtual void leave(std::span<const std::byte> farewell) = 0;

  // Whether the first `rounds` rounds have completed; waits for that a while.
  bool wait(std::int64_t rounds, Clock::duration patience);
  // A machine for which the oldest round waits, or -1.
  virtual int awaited() const = 0;
  // Whether nothing more will come from a machine.
  bool lost(int host) const;
  // Waits a while for the last words of so many other machines.
  void wait_for_farewells(int hosts, Clock::duration patience);

  // For implementations, from any thread. One more round has completed.
  void complete();
  void lose(int host);
  // A machine has said farewell, or is lost and will not.
  void finished(int host);
  // Another machine's farewell has come: bytes that nobody has looked at.
  void heard(int host, std::span<const std::byte> farewell);
  // Who wants to know of farewells, also of earlier ones; nobody, with an empty function.
  using Listener = std::function<void(int host, std::span<const std::byte> farewell)>;
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

// One stripe's machines, all in this process. A parcel is copied by whoever comes second.
class LocalTransport : public Transport {
 public:
  // Their transports, in the order of machines.
  static std::vector<std::shared_ptr<LocalTransport>> make(int hosts);

  void post(const Round& round) override;
  void stop(std::span<const std::byte> farewell) override;
  void disconnect() override;
  void leave(std::span<const std::byte> farewell) override;
  int awaited() const override;

 private:
  struct Waiting {
    Parcel parcel;
    std::int64_t round;
  };
  struct Shared {
    std::mutex mutex;
    std::vector<std::weak_ptr<LocalTransport>> ends;
    // By sender and receiver.
    std::map<std::pair<int, int>, std::deque<Waiting>> sends, receives;
  };

  LocalTransport(std::shared_ptr<Shared> shared, int host)
      : shared_(std::move(shared)), host_(host) {}
  bool meet(std::deque<Waiting>& others, const Parcel& parcel, bool sending);
  void finish(std::int64_t round);
  template <class Tell>
  void tell_others(Tell tell);

  std::shared_ptr<Shared> shared_;
  const int host_;
  bool connected_ = true;
  std::deque<std::int64_t> missing_;  // parcels, of the rounds that have not completed
  std::int64_t first_ = 0;            // the number of the first of these
};

}  // namespace pycomm::cpu

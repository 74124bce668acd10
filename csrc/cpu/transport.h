// What carries bytes between machines, between the ranks that carry one stripe: one of each machine.
// Here the interface, and the transport between machines that are imagined within one process; the one
// over torch.distributed is Python's (pycomm/_hosts.py).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "cpu/comm.h"

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
  virtual ~Transport() = default;

  // Starts a round. What a machine sends to another, in the order of its rounds, is what that one
  // receives from it, in the order of its own, and equally long.
  virtual void post(const Round& round) = 0;
  // Lets go of all memory, and tells the other machines why this one stops.
  virtual void stop(std::uint64_t abort_word) = 0;
  // Tells the other machines that no round will follow.
  virtual void leave() = 0;

  // Whether the first `rounds` rounds have completed; waits for that a while.
  bool wait(std::int64_t rounds, Clock::duration patience);
  // A machine for which the oldest round waits, or -1.
  virtual int awaited() const = 0;
  // Whether nothing more will come from a machine.
  bool lost(int host) const;

  // For implementations, from any thread. One more round has completed.
  void complete();
  void lose(int host);
  // Another machine has stopped.
  void stopped(std::uint64_t abort_word);
  // Who wants to know of that, even if it has been; nobody, with an empty function.
  void listen(std::function<void(std::uint64_t)> listener);

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t completed_ = 0;
  std::set<int> lost_;
  std::mutex listener_mutex_;
  std::function<void(std::uint64_t)> listener_;
  std::uint64_t stopped_ = 0;  // the word
};

// One stripe's machines, all in this process. A parcel is copied by whoever comes second.
class LocalTransport : public Transport {
 public:
  // Their transports, in the order of machines.
  static std::vector<std::shared_ptr<LocalTransport>> make(int hosts);

  void post(const Round& round) override;
  void stop(std::uint64_t abort_word) override;
  void leave() override;
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
  void withdraw();
  template <class Tell>
  void tell_others(Tell tell);

  std::shared_ptr<Shared> shared_;
  const int host_;
  std::deque<std::int64_t> missing_;  // parcels, of the rounds that have not completed
  std::int64_t first_ = 0;            // the number of the first of these
};

}  // namespace pycomm::cpu

// What the parts of a rank's engine share: its place in the window, and its pending requests.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cpu/executor/comm.h"
#include "cpu/memory/window.h"
#include "cpu/p2p/port.h"
#include "cpu/p2p/request.h"

namespace pycomm::cpu::p2p {

// The group has been aborted, by this rank or another one; the abort word says why.
struct Stopped {};

// The requests that have not completed, and those that have but whose callbacks are due.
class Requests {
 public:
  void add(const RequestPtr& request) {
    request->place = pending_.size();
    pending_.push_back(request);
  }
  void complete(const RequestPtr& request) {
    pending_.back()->place = request->place;
    pending_[request->place] = pending_.back();
    pending_.pop_back();
    if (request->callback.function != nullptr) finished_.push_back(request);
    request->done.store(true, std::memory_order_release);
  }
  const std::vector<RequestPtr>& pending() const { return pending_; }
  std::vector<RequestPtr> take_finished() { return std::exchange(finished_, {}); }
  bool any_finished() const { return !finished_.empty(); }

 private:
  std::vector<RequestPtr> pending_;
  std::vector<RequestPtr> finished_;
};

struct Node {
  Window& window;
  Comm& comm;
  const Port* port = nullptr;  // if the group spans nodes
  Requests requests = {};
  std::shared_ptr<DeviceCopies> copies = {};  // if this rank has a device
  std::vector<std::int64_t> free_slots = {};  // in the window of the device
  bool awaits_device = false;                 // this turn has found work that is not complete

  int rank() const { return comm.rank(); }
  Range heap_range() const {
    return {window.heap_begin(), window.slice_bytes() - window.heap_begin()};
  }
  // Wakes rank r if it sleeps; call it after what it waits for has been stored in sequentially
  // consistent order.
  void wake(int r) const {
    if (window.control(r).p2p_asleep.load() != 0) ring(r);
  }
  // Rank r sleeps on its bell, or, if messages also come from other nodes, on its sockets.
  void ring(int r) const {
    port == nullptr ? window.control(r).p2p_bell.ring() : port->knock(comm.number(r));
  }
  // Copies between this rank's memory and another rank's heap. Either this rank sees an abort here,
  // or the rank that fails sees that this one uses its memory: both write first and read
  // afterwards, in one total order.
  void copy_in_peers_heap(std::byte* to, const std::byte* from, std::int64_t bytes) const;
  // True if work of the device is complete.
  bool passed(DeviceCopies::Mark& mark) {
    const bool has_passed = mark == nullptr || copies->passed(mark);
    awaits_device |= !has_passed;
    return has_passed;
  }
  // Checks that a message and the receive that it matches agree. Aborts the group if not. `source`
  // is the sender's number in the whole group.
  void check_match(int source, const Frame& frame, const Request& receive) const;
};

// The most that is copied directly before other messages get their turn.
inline constexpr std::int64_t kSliceBytes = 1 << 20;
// The most of a message on a device that is copied at a time, unless other ranks read it in place.
inline constexpr std::int64_t kSlotBytes = 2 << 20;

}  // namespace pycomm::cpu::p2p

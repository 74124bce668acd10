// The connection of a rank to the ranks of other nodes that carry the same stripe. For the
// algorithm (core/algorithms/internode.h) and the codecs' executors, each node is one rank.
//
// An operation begins with a handshake, as an operation in shared memory begins with an
// announcement: all nodes must call the same operation. Every wait checks the node's abort word,
// the deadline, and whether nodes are gone. It also shows the other ranks of its node that it is
// waiting, so that they do not time out. A failure becomes the node's abort word, which the
// transport passes on to the other nodes.
//
// A stripe that travels in rounds (core/algorithms/dissemination.h) has the handshakes of all nodes
// with it. Before it, a node gets one handshake, that of the next node. If not all nodes have called
// the same operation, going round the nodes, some node differs from the next one. Among nodes of which
// only some send their handshakes to all, one that does not differs from the next one, which does. So
// some node finds the difference at once, whoever else waits for what, and its farewell ends all waits.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/message.h"
#include "core/nodes.h"
#include "cpu/executor/comm.h"
#include "cpu/internode/transport.h"

namespace pycomm::cpu {

// A buffer that is kept from one use to the next and grows if needed.
class Scratch {
 public:
  std::byte* bytes(std::int64_t count) {
    if (count > room_ || data_ == nullptr) {
      count = std::max(count, kLine);  // never null
      data_.reset(static_cast<std::byte*>(
          std::aligned_alloc(kLine, static_cast<std::size_t>(round_up(count, kLine)))));
      if (data_ == nullptr) throw std::bad_alloc();
      room_ = count;
    }
    return data_.get();
  }
  float* floats(std::int64_t count) {
    return reinterpret_cast<float*>(bytes(count * static_cast<std::int64_t>(sizeof(float))));
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::int64_t room_ = 0;
};

class Link {
 public:
  // Carries the stripe whose index is this rank's number within its node.
  Link(Comm& local, std::shared_ptr<Transport> transport, const Nodes& nodes,
       Clock::duration timeout);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Begins the next operation.
  void begin(void (*interrupt)());
  // Sets the operation's tensor, for the codecs' executors. `preflight` is this node's.
  void begin_tensor(const Operation& operation, const void* input, void* output,
                    Preflight preflight);
  // Exchanges handshakes with the other nodes.
  void announce() {
    publish(true);
    await_announcements();
  }
  // Sends the handshake to all nodes, or only to the one before this one.
  void publish(bool to_all);
  // Handshakes that travel in rounds. write_handshake() writes this node's. read_handshake() reads those
  // of all nodes, in node order; check_announcements() then compares them.
  static constexpr std::int64_t kHandshakeBytes = sizeof(Handshake);
  void write_handshake(std::byte* to) const;
  void read_handshake(int node, const std::byte* from);
  void check_announcements();
  // Every wait for a later batch includes this.
  void await_announcements() { wait(handshake_batch_); }
  // The preflight of all nodes; valid after await_announcements().
  const Preflight& preflight() const { return preflight_; }

  int rank() const { return nodes_.here; }
  int size() const { return nodes_.count(); }
  int stripe() const { return local_.rank(); }
  int contributors() const { return nodes_.world(); }
  std::uint32_t stream() const {
    return static_cast<std::uint32_t>(rank() * nodes_.stripes() + stripe());
  }
  std::int64_t count() const { return operation_.count; }
  std::int64_t elements(std::int64_t bytes) const { return bytes / element_size(); }
  std::int64_t element_size() const { return size_of(operation_.dtype); }
  Location input() const { return {input_, rank()}; }
  Location output() const { return {output_, rank()}; }
  Location input(int) const { return input(); }
  Location output(int) const { return output(); }
  Location at(Location location, std::int64_t elements) const {
    return {location.data + elements * element_size(), location.rank};
  }
  // This rank's memory for what rank r writes.
  std::byte* announced_area(int r, std::int64_t bytes) {
    return areas_[static_cast<std::size_t>(r)].bytes(bytes);
  }
  void trim() {
    for (Scratch& area : areas_) area = {};
  }
  void count_in(std::int64_t) {}  // post() counts transfers
  // Blames a node that has sent invalid data.
  [[noreturn]] void blame(int node, const std::string& what) {
    local_.blame_number(number(node), what);
  }

  // post() starts a batch and returns its number, from 1. wait() returns when that batch has
  // completed.
  // What the batch brings may have waited for others in turn, over so many nodes. This node then gives
  // up later than they do, who know better which node is missing.
  std::int64_t post(const Batch& batch);
  void wait(std::int64_t batch, int hops = 0);

  // Tells the other nodes if this one has been aborted.
  void tell();
  void tell(std::uint64_t word);
  // Like tell(), then hears why the other nodes stop and decides on one culprit for all
  // (Comm::decide_culprit). Afterwards nothing uses the memory of posted transfers. A background
  // thread also calls it, in case no operation is under way.
  void stop();
  void leave();
  const LinkTraffic& traffic() const { return traffic_; }
  // Completes what is known of another node. From any thread.
  void describe(NodeState& state);

 private:
  int number(int node) const { return nodes_.rank(node, stripe()); }
  Sender sender(int node) const { return {transport_->secret(), node}; }
  std::set<int> others() const;
  std::set<int> blameless();
  std::uint64_t least_word();
  void hear(int node, std::span<const std::byte> farewell);
  void watch();
  void look_before_handshake(Clock::duration waited, Clock::duration& lost_since);
  void look_for_failure(std::int64_t batch, int hops, Clock::duration waited,
                        Clock::duration& lost_since);
  int find_lost(bool handshake) const;
  int awaited() const;

  Comm& local_;
  std::shared_ptr<Transport> transport_;
  const Nodes& nodes_;
  const Clock::duration timeout_;
  Operation operation_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  void (*interrupt_)() = nullptr;
  // One per node; those of other nodes are unchecked bytes until await_announcements().
  std::vector<Handshake> handshakes_;
  std::vector<int> announced_;        // nodes whose handshakes are there, and this one
  std::int64_t handshake_batch_ = 0;  // the batch of the last handshake
  std::atomic<std::uint32_t> handshake_operation_;  // and the operation's number
  Preflight preflight_;
  std::vector<Scratch> areas_;
  std::int64_t posted_ = 0, waited_ = 0;
  std::atomic<int> waits_for_{-1};  // a node, in a wait that has taken a while
  LinkTraffic traffic_;
  std::mutex stop_mutex_;
  bool stopped_ = false;
  std::mutex heard_mutex_;
  std::map<int, std::uint64_t> heard_;  // other nodes' farewells: abort word, or 0 if one leaves
  std::optional<std::set<int>> lost_;   // the nodes that were lost when this one stopped
  std::mutex left_mutex_;
  std::condition_variable left_changed_;
  bool left_ = false;
  std::thread watcher_;
};

}  // namespace pycomm::cpu

// The point-to-point engine of one rank: sends and receives between ranks, of one node in shared
// memory, of different nodes over TCP (cpu/p2p/streams.h).
//
// An operation proceeds when a thread of this rank lets it: a thread that calls or waits for one
// drives all of them. If an asynchronous operation is pending and no thread waits, a thread of the
// engine does it. The protocol is described in docs/explanation/algorithms.md#point-to-point.
//
// Thread-safe. Ranks are numbered as in the whole group.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "core/errors.h"
#include "cpu/executor/waiting.h"
#include "cpu/executor/waiting_time.h"
#include "cpu/p2p/incoming.h"
#include "cpu/p2p/matcher.h"
#include "cpu/p2p/node.h"
#include "cpu/p2p/outgoing.h"
#include "cpu/p2p/request.h"
#include "cpu/p2p/streams.h"

namespace pycomm::cpu::p2p {

// How an engine reaches other nodes, if the group spans nodes.
struct OtherNodes {
  const Nodes& nodes;
  Port& port;
  // After an abort: has all nodes agree on the rank to blame.
  std::function<void()> stop;
};

class Engine {
 public:
  // `failed` is called once, with the first operation's error, when the engine has failed. `told`
  // is set when a caller gets the error.
  Engine(Window& window, Comm& comm, std::shared_ptr<std::atomic<bool>> told,
         std::function<void(const CollectiveError&)> failed,
         std::optional<OtherNodes> others = std::nullopt);
  ~Engine() { close(nullptr); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Lets messages to and from this rank use its device. All ranks of the node call this, and then
  // send_on_device() when all have done so.
  void serve_device(std::shared_ptr<DeviceCopies> copies);
  void send_on_device();
  // True if a message of this size from or to a device of this number can stay on devices, except if
  // the other side is in host memory.
  bool reaches(int device, int peer, std::int64_t bytes);
  // Start an operation. The buffer must live until the request has completed.
  RequestPtr isend(const void* data, const Envelope& envelope, const Options& options = {});
  RequestPtr irecv(void* data, const Envelope& envelope, const Options& options = {});
  // Run an operation on this thread; recv() returns the source.
  void send(const void* data, const Envelope& envelope, const Options& options = {});
  int recv(void* data, const Envelope& envelope, const Options& options = {});

  // True if no operation is pending.
  bool idle();
  // True if a thread waits here for a message that this rank has not sent.
  bool awaits(int rank);
  // Completes all operations and ends the thread; afterwards the engine refuses operations. If
  // `interrupt` throws, the group is aborted.
  void close(void (*interrupt)());
  // Tells ranks of other nodes that this one leaves the group. The others see it in the window.
  void leave();

 private:
  friend struct Request;
  using Lock = std::unique_lock<std::mutex>;

  RequestPtr make(bool receives, void* data, const Envelope& envelope, const Options& options);
  // `inline_wait`: the caller is about to wait for the request.
  void start(const RequestPtr& request, bool inline_wait);
  void start_thread();
  void post_send(const RequestPtr& request);
  void post_receive(const RequestPtr& request);
  void send_to_self(const RequestPtr& request);

  // What Request::wait does. Throw GroupUnusable in a forked process.
  void wait(Request& request, void (*interrupt)());
  bool wait(Request& request, Clock::duration patience);
  void check_not_forked() const;
  void rethrow(Request& request);
  void finish(Request& request, void (*interrupt)());
  bool await(Request& request, Clock::time_point until, void (*interrupt)());
  // Drives all operations until over() or `until`.
  template <class Over>
  void drive(Lock& lock, Clock::time_point until, Over over);
  void serve();

  // Runs `work`, and handles what it throws; then calls the callbacks that are due, without the
  // lock.
  bool guarded(Lock& lock, const std::function<bool()>& work);
  bool progress();
  bool progress_with(int r);  // by its index on this node
  void doze(Lock& lock, Clock::duration most);
  void look(Clock::time_point now);
  void look_for_the_gone(Clock::duration time);
  void abort(std::uint64_t word, const std::string& cause);
  [[noreturn]] void stop_with(std::uint64_t word, const std::string& cause);
  bool needs(int rank, bool died) const;
  void check_gone(int rank, bool died);
  void end_receives_from(int rank);
  // `time` is the time in which this rank could run.
  void check_deadlines(Clock::time_point now, Clock::duration time);
  [[noreturn]] void time_out(const Request& request, Clock::duration time);
  Control& mine() const { return node_.window.control(node_.rank()); }
  int self() const { return node_.comm.number(node_.rank()); }
  int world() const { return node_.comm.peers().count(); }

  void fail(const std::string& cause);
  void retreat();
  void detach();
  CollectiveError failure_of(std::uint64_t word, const Request& request,
                             const std::string& cause) const;

  const unsigned forks_;
  std::mutex mutex_;
  const std::optional<OtherNodes> others_;
  Node node_;
  Matcher matcher_;
  std::deque<Incoming> incoming_;  // by index on this node
  std::deque<Outgoing> outgoing_;
  std::optional<Streams> streams_;  // with ranks of other nodes
  const std::shared_ptr<std::atomic<bool>> told_;
  const std::function<void(const CollectiveError&)> failed_;
  std::uint32_t count_ = 0;  // operations so far
  bool ended_ = false;       // closed or failed
  bool sends_on_device_ = false;
  WaitingTime clock_;  // counts the time in which this rank could run
  Clock::time_point look_at_ = {};
  int looked_at_ = 0;
  std::string cause_;  // of malformed data

  int waiters_ = 0;      // threads in await()
  bool driven_ = false;  // one of them drives
  Yielding yielding_ = node_.comm.yielding();
  int dozing_ = 0;
  std::condition_variable changed_;
  std::condition_variable thread_needed_;
  bool resting_ = false;  // the thread sleeps until it is needed
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace pycomm::cpu::p2p

// How memory of a CUDA window's heap is used again (cpu/memory/device_heap.h), in all orders with few
// delays (checker/explorer.h). Each rank has a heap of its own, two threads that share it, and a device
// with two streams. On one stream run operations of all ranks, on tensors in their heaps: the algorithms
// of core/, on the checker's executor. On the other stream run the program's kernels. Tensors are
// released as soon as their work is enqueued. Vector clocks (checker/memory.h) find each use of a block
// that nothing orders after its use as an earlier tensor, by any stream of any rank.
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "checker/comm.h"
#include "checker/explorer.h"
#include "checker/locks.h"
#include "core/algorithms/run.h"
#include "cpu/memory/device_heap.h"
#include "support/run_all.h"

unsigned pycomm::cpu::current_forks() { return 0; }

namespace pycomm::test {
namespace {

using namespace checker;

// A heap has room for a tensor of each of the rank's threads.
constexpr std::int64_t kTensor = 2 * cpu::DeviceHeap::kUnit, kHeap = 2 * kTensor;
constexpr Unit kElement{4};

struct Scenario {
  int ranks = 2;
  Collective collective = Collective::all_reduce;
  int tensors = 3;       // of each thread
  bool computes = true;  // the second thread does something
  int fails_in = -1;     // the wait in which rank 1's second operation fails
  bool closes = false;   // rank 0's first thread closes the heap after its tensors
};

class Stream {
 public:
  Stream(Fibers& fibers, int index, int process, const std::string& name)
      : thread(index, process, name), fibers_(fibers) {}

  void enqueue(Thread& by, std::function<void()> work) {
    tasks_.push_back({std::move(work), by.release()});
  }
  // The number of tasks that have been enqueued.
  std::size_t enqueued() const { return tasks_.size(); }
  // Returns when so many tasks have ended, and tells the waiting thread what they have done.
  void await(Thread& waiting, std::size_t count) {
    if (count == 0) return;
    fibers_.wait_until([=, this] { return ends_.size() >= count; },
                       [this] { return "waits for " + thread.name; });
    waiting.clock.join(ends_[count - 1]);
  }
  // True if all tasks have ended, and the threads that enqueue them, too.
  bool over(int threads) const { return threads == 0 && ends_.size() == tasks_.size(); }
  // Runs the tasks, one after another, up to the last one.
  void live(const int& threads) {
    while (true) {
      fibers_.wait_until([&] { return ends_.size() < tasks_.size() || over(threads); },
                         [this] { return thread.name + " has nothing to do"; });
      if (over(threads)) return;
      const Task task = tasks_[ends_.size()];
      thread.clock.join(task.enqueued);
      task.work();
      ends_.push_back(thread.release());
    }
  }

  Thread thread;

 private:
  struct Task {
    std::function<void()> work;
    Clock enqueued;
  };
  Fibers& fibers_;
  std::vector<Task> tasks_;
  std::vector<Clock> ends_;  // what a stream has done by the end of each task
};

struct Failed {
  Reason reason = Reason::none;
};

// As cuda::Endpoint and cpu::Group, for await_unused().
class Device {
 public:
  Device(Fibers& fibers, Stream& first, Stream& second, std::function<Thread&()> running)
      : fibers_(fibers), streams_{&first, &second}, running_(std::move(running)) {}
  void synchronize() {
    if (closed) throw Violation("the heap waits for a device after it has been closed");
    std::array<std::size_t, 2> counts{};
    for (std::size_t s = 0; s < 2; ++s) counts[s] = streams_[s]->enqueued();
    fibers_.pause();
    for (std::size_t s = 0; s < 2; ++s) streams_[s]->await(running_(), counts[s]);
    fibers_.pause();
  }
  Failed failure() const { return failed; }

  Failed failed;
  bool closed = false;

 private:
  Fibers& fibers_;
  const std::array<Stream*, 2> streams_;
  const std::function<Thread&()> running_;
};

struct Host {
  const Node& node;
  std::uint64_t abort_word() const { return static_cast<std::uint64_t>(node.abort.value); }
};

// A rank's fibers, in this order.
enum Part : std::size_t { kTrains, kComputes, kOperations, kKernels, kWatches, kParts };

struct Rank {
  Rank(Fibers& fibers, int rank, std::function<Thread&()> running)
      : rank(rank),
        hosts{named(kTrains, "first thread"), named(kComputes, "second thread")},
        operations(fibers, index(kOperations), index(kOperations), name("operations")),
        kernels(fibers, index(kKernels), index(kKernels), name("kernels")),
        watcher(named(kWatches, "watcher")),
        device(fibers, operations, kernels, std::move(running)) {}
  Thread& thread(std::size_t part) {
    if (part == kWatches) return watcher;
    return part < kOperations    ? hosts[part]
           : part == kOperations ? operations.thread
                                 : kernels.thread;
  }

  const int rank;
  std::array<Thread, 2> hosts;
  Stream operations, kernels;
  Thread watcher;
  Device device;
  std::unique_ptr<Comm> comm;
  std::unique_ptr<cpu::DeviceHeap> heap;
  std::byte* output = nullptr;  // of reduce-scatters; outside of the heap
  int threads = 2;              // that have not ended
  bool closed = false;          // close() has returned

 private:
  int index(Part part) const { return rank * static_cast<int>(kParts) + static_cast<int>(part); }
  std::string name(const char* what) const { return "rank " + std::to_string(rank) + "'s " + what; }
  Thread named(Part part, const char* what) const { return {index(part), index(part), name(what)}; }
};

class World {
 public:
  World(const Scenario& scenario, Fibers::Choice choice)
      : scenario_(scenario),
        fibers_(std::move(choice)),
        locks_(
            fibers_, [this](const void* mutex) { running().clock.join(given_[mutex]); },
            [this](const void* mutex) { given_[mutex] = running().release(); }) {
    std::vector<Thread*> streams;
    for (int r = 0; r < scenario_.ranks; ++r) {
      ranks_.push_back(
          std::make_unique<Rank>(fibers_, r, [this]() -> Thread& { return running(); }));
      for (std::size_t part = 0; part < kParts; ++part) {
        memory_.introduce(ranks_.back()->thread(part));
      }
      streams.push_back(&ranks_.back()->operations.thread);
    }
    node_ = std::make_unique<Node>(memory_, symbols_, fibers_, Layout{}, streams);
    host_ = std::make_unique<Host>(*node_);
    for (const auto& rank : ranks_) make_heap(*rank);
  }

  void run() {
    use_locks(&locks_);
    fibers_.run(scenario_.ranks * static_cast<int>(kParts), [this](int i) {
      const auto fiber = static_cast<std::size_t>(i);
      live(*ranks_[fiber / kParts], static_cast<Part>(fiber % kParts));
    });
    use_locks(nullptr);
  }

 private:
  Thread& running() {
    return ranks_[fibers_.current() / kParts]->thread(fibers_.current() % kParts);
  }

  void make_heap(Rank& mine) {
    const int owner = mine.operations.thread.index;
    const std::string name = mine.operations.thread.name;
    std::byte* const begin = memory_.add("the heap of " + name, owner, kHeap, true);
    mine.output = memory_.add("the output of " + name, owner, kHeap, false);
    mine.heap = std::make_unique<cpu::DeviceHeap>(
        reinterpret_cast<std::uintptr_t>(begin), kHeap,
        [&mine, this] { return cpu::await_unused(mine.device, *host_); });
    mine.comm = std::make_unique<Comm>(*node_, mine.rank);
  }

  void live(Rank& mine, Part part) {
    switch (part) {
      case kOperations:
        return mine.operations.live(mine.threads);
      case kKernels:
        return mine.kernels.live(mine.threads);
      case kWatches:
        return watch(mine);
      default:
        if (part == kTrains) use_tensors(mine, [&](std::byte* x, int k) { train(mine, x, k); });
        if (part == kComputes && scenario_.computes) {
          use_tensors(mine, [&](std::byte* x, int k) { compute(mine, x, k); });
        }
        if (part == kTrains && scenario_.closes && mine.rank == 0) {
          mine.heap->close();
          mine.closed = mine.device.closed = true;
        }
        --mine.threads;
    }
  }

  // Makes tensors one after another, and releases each as soon as its work is enqueued.
  void use_tensors(Rank& mine, const std::function<void(std::byte*, int)>& enqueue) {
    for (int k = 0; k < scenario_.tensors; ++k) {
      const bool was_closed = mine.closed;
      const std::uintptr_t made = mine.heap->take(kTensor, true);
      if (made == 0) {
        const bool may_fail = scenario_.fails_in >= 0 || (scenario_.closes && mine.rank == 0);
        if (!may_fail) throw Violation("the heap finds no room, but there is some");
        return;
      }
      if (was_closed) throw Violation("a heap that has been closed hands out memory");
      enqueue(reinterpret_cast<std::byte*>(made), k);
      mine.heap->release(made);
    }
  }

  void fill(Thread& thread, std::byte* x, std::int64_t bytes, Symbol value) {
    memory_.write(thread, x, {{bytes / kElement.bytes, value, 0}}, kElement);
  }

  // An operation of all ranks on what the stream has written before.
  void train(Rank& mine, std::byte* x, int k) {
    mine.operations.enqueue(running(), [&mine, x, k, this] {
      Thread& thread = mine.operations.thread;
      thread.begin("operation " + std::to_string(k));
      fill(thread, x, kTensor, symbols_.contribution({k, mine.rank}));
      if (mine.device.failed.reason != Reason::none) return;  // the kernel drains
      mine.comm->fail_at(mine.rank == 1 && k == 1 && scenario_.fails_in >= 0 ? scenario_.fails_in
                                                                             : Comm::kNeverFails);
      try {
        operate(mine, x, k);
      } catch (const Stopped&) {
        mine.device.failed.reason = Reason::timeout;
      }
    });
  }

  void operate(Rank& mine, std::byte* x, int k) {
    const bool scatters = scenario_.collective == Collective::reduce_scatter;
    const std::int64_t parts = scatters ? scenario_.ranks : 1;
    std::byte* const output = scatters ? mine.output : x;
    const Operation operation{scenario_.collective,
                              Algorithm::two_shot,
                              DType::f32,
                              ReduceOp::sum,
                              0,
                              kTensor / kElement.bytes / parts};
    mine.comm->begin(operation, x, output);
    pycomm::run(*mine.comm, operation);
    mine.comm->finish();
    std::vector<Contribution> wanted;
    for (int r = 0; r < scenario_.ranks; ++r) wanted.push_back({k, r});
    const Thread& thread = mine.operations.thread;
    for (const Piece& piece : memory_.read(thread, output, operation.count, kElement)) {
      if (symbols_.contributions(piece.symbol) != wanted) throw Violation("a sum is wrong");
    }
  }

  // Kernels of the program on its own stream.
  void compute(Rank& mine, std::byte* x, int k) {
    mine.kernels.enqueue(running(), [&mine, x, k, this] {
      Thread& thread = mine.kernels.thread;
      thread.begin("kernel " + std::to_string(k));
      const std::int64_t bytes = kTensor;
      const Symbol value = symbols_.contribution({scenario_.tensors + k, mine.rank});
      fill(thread, x, bytes, value);
      fibers_.pause();
      for (const Piece& piece : memory_.read(thread, x, bytes / kElement.bytes, kElement)) {
        if (piece.symbol != value) throw Violation("a kernel finds another tensor in its own");
      }
    });
  }

  // Ends the group some time after a kernel has failed.
  void watch(Rank& mine) {
    if (scenario_.fails_in < 0) return;
    fibers_.wait_until(
        [&] {
          return mine.device.failed.reason != Reason::none || mine.operations.over(mine.threads);
        },
        [] { return "watches"; });
    if (mine.device.failed.reason == Reason::none) return;
    fibers_.pause();
    node_->abort.value = 1;
    node_->abort.clock.join(mine.watcher.release());
  }

  const Scenario scenario_;
  Fibers fibers_;
  std::map<const void*, Clock> given_;  // by mutex
  Locks locks_;
  Symbols symbols_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Memory memory_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<Host> host_;
};

void explore(const Scenario& scenario, std::size_t delays) {
  Explorer explorer(delays);
  while (explorer.next()) {
    try {
      World(scenario, explorer.choice()).run();
    } catch (const std::exception& error) {
      std::printf("FAILED  %s\n", error.what());
      std::fflush(stdout);
      std::_Exit(1);  // fibers have not ended
    }
  }
  std::printf("%zu orders\n", explorer.runs());
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  using pycomm::Collective;
  return run_until_failure({
      {"all-reduces", [] { explore({}, 2); }},
      {"reduce-scatters", [] { explore({.collective = Collective::reduce_scatter}, 2); }},
      {"one rank", [] { explore({.ranks = 1}, 3); }},
      {"one thread", [] { explore({.tensors = 2, .computes = false}, 3); }},
      {"an operation fails",
       [] {
         for (int wait = 0; wait < 3; ++wait) explore({.tensors = 3, .fails_in = wait}, 2);
       }},
      {"the heap is closed", [] { explore({.tensors = 2, .closes = true}, 2); }},
  });
}

// Every wait ends: by timeouts, ranks that leave, aborts, or mismatches.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "cpu/executor/waiting.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

void sum(cpu::Group& group, std::int64_t count, Algorithm algorithm = Algorithm::two_shot) {
  std::vector<float> x(static_cast<std::size_t>(count), 1);
  group.run({Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, count}, x.data(),
            x.data());
}

// The error that `body` throws.
CollectiveError error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CollectiveError& error) {
    return error;
  }
  throw std::runtime_error("a CollectiveError was expected");
}

void refuses_afterwards(cpu::Group& group) {
  try {
    sum(group, 1);
  } catch (const cpu::GroupUnusable&) {
    return;
  }
  throw std::runtime_error("a failed group must refuse work");
}

void yields_while_cores_come_back() {
  using std::chrono::microseconds;
  cpu::Yielding yielding(microseconds(2000));
  const cpu::Clock::time_point start = cpu::Clock::now();
  const auto pays = [&](int after, int waited) {
    return yielding.pays(start + microseconds(after - waited), start + microseconds(after));
  };
  const auto took = [&](int from, int to) {
    yielding.took(start + microseconds(from), start + microseconds(to));
  };
  took(10, 11);
  PYCOMM_CHECK(pays(20, 10) && pays(1999, 1999), "a wait of less than 2 ms yields");
  PYCOMM_CHECK(!pays(2000, 2000), "a longer one sleeps");
  took(3000, 6000);
  PYCOMM_CHECK(!pays(6001, 1) && !pays(105'999, 10), "all sleep after a yield of 3 ms");
  PYCOMM_CHECK(pays(106'000, 10), "for 100 ms");
}

// The yields of ranks, each of which takes long, as if another program had got the core; negative if
// they are the system's.
std::atomic<int> slow_yields = -1;

void sleeps_while_others_want_the_core() {
  World world(2);
  constexpr int kOperations = 5;
  slow_yields = 0;
  world.run([&](int r) {
    for (int i = 0; i < kOperations; ++i) {
      if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      sum(world[r], 100);
    }
  });
  const int yields = slow_yields.exchange(-1);
  // Without the rule, rank 0 yields for 2 ms in each operation.
  PYCOMM_CHECK(yields > 0 && yields <= 2 * kOperations,
               "a slow yield must be the last one for a while, got " + std::to_string(yields));
}

void times_out() {
  World world(4, 64 << 10, 0, 0.3);
  world.run([&](int r) {
    sum(world[r], 100);
    if (r == 2) return;  // takes no part
    const CollectiveError error = error_of([&] { sum(world[r], 100, Algorithm::ring); });
    PYCOMM_CHECK(error.reason == Reason::timeout, "a silent rank must cause Timeout");
    refuses_afterwards(world[r]);
  });
}

void blames_the_silent() {
  World world(4, 64 << 10, 0, 0.3);
  world.run([&](int r) {
    if (r == 2) return;
    const CollectiveError error = error_of([&] { sum(world[r], 100); });
    PYCOMM_CHECK(error.rank == 2, "Timeout must name rank 2, named " + std::to_string(error.rank));
    PYCOMM_CHECK(error.operation == "all_reduce" && error.sequence == 1, "and what was going on");
  });
}

void notices_who_leaves() {
  World world(3);
  std::barrier done(3);  // otherwise the error could hit a late rank's first operation
  world.run([&](int r) {
    sum(world[r], 5000, Algorithm::tree);
    done.arrive_and_wait();
    if (r == 1) {
      world[r].close();
      return;
    }
    const CollectiveError error = error_of([&] { sum(world[r], 5000, Algorithm::ring); });
    PYCOMM_CHECK(error.reason == Reason::peer_died && error.rank == 1, "rank 1 has left");
    PYCOMM_CHECK(error.sequence == 2, "in the second operation");
  });
}

void leaving_after_the_last_is_fine() {
  for (int round = 0; round < 50; ++round) {
    World world(3);
    world.run([&](int r) {
      sum(world[r], 4000, Algorithm::ring);
      world[r].close();
    });
  }
}

void aborts() {
  World world(3);
  world.run([&](int r) {
    if (r == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      world[r].abort();
      world[r].abort();
      return;
    }
    const CollectiveError error = error_of([&] { sum(world[r], 10); });
    PYCOMM_CHECK(error.reason == Reason::aborted && error.rank == 0, "rank 0 has aborted");
    refuses_afterwards(world[r]);
  });
}

void disagreement_is_told_to_all() {
  World world(4);
  world.run([&](int r) {
    const CollectiveError error = error_of([&] { sum(world[r], r == 2 ? 11 : 10); });
    PYCOMM_CHECK(error.reason == Reason::mismatch && error.rank == 2, "rank 2 disagrees");
    const std::string text = error.what();
    PYCOMM_CHECK(text.find("10 elements") != std::string::npos, "one side");
    PYCOMM_CHECK(text.find("11 elements") != std::string::npos, "the other side");
    refuses_afterwards(world[r]);
  });
}

void a_failed_work_throws() {
  World world(2, 64 << 10, 0, 0.2);
  std::vector<float> x(10);
  const auto work =
      world[0].submit({Collective::all_reduce, Algorithm::ring, DType::f32, ReduceOp::sum, 0, 10},
                      x.data(), x.data());
  const CollectiveError error = error_of([&] { work->wait(std::chrono::seconds(10)); });
  PYCOMM_CHECK(error.reason == Reason::timeout && error.rank == 1, "rank 1 was silent");
}

void interrupts_a_wait() {
  World world(2);
  static std::atomic<int> calls{0};
  world.run([&](int r) {
    std::vector<float> x(10);
    const Operation operation{
        Collective::all_reduce, Algorithm::tree, DType::f32, ReduceOp::sum, 0, 10};
    if (r == 1) {
      while (calls.load() == 0) std::this_thread::yield();
      PYCOMM_CHECK(error_of([&] { sum(world[r], 10, Algorithm::tree); }).reason == Reason::aborted,
                   "an interrupted rank aborts the group");
      return;
    }
    try {
      world[r].run(operation, x.data(), x.data(), [] {
        ++calls;
        throw std::runtime_error("interrupted");
      });
    } catch (const std::runtime_error& error) {
      PYCOMM_CHECK(std::string(error.what()) == "interrupted", "the interrupt's own exception");
    }
  });
}

// The first of two calls has used up its residual when the second one fails: neither result counts.
void a_failed_exchange_puts_residuals_back() {
  constexpr std::int64_t kCount = 1000;
  World world(2);
  world.run([&](int r) {
    std::vector<float> x(kCount), residual(kCount, 0.125f), before(kCount), y(kCount);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.37f * static_cast<float>(i + 1);
    Call first{{Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::avg, 0, kCount},
               x.data(),
               x.data()};
    first.operation.codec.kind = CodecKind::int8;
    first.operation.codec.block = 256;
    first.operation.codec.feedback = 1;
    first.feedback.residual = residual.data();
    first.feedback.residual_before = before.data();
    if (r == 1) {
      world[r].run(first);
      PYCOMM_CHECK(residual != std::vector<float>(kCount, 0.125f), "the residual has been spent");
      world[r].abort();
      return;
    }
    Call second = first;
    second.operation.codec = {};
    second.feedback = {};
    second.input = second.output = y.data();
    const auto work = world[r].submit({first, second});
    const CollectiveError error = error_of([&] { work->wait(std::chrono::seconds(10)); });
    PYCOMM_CHECK(error.reason == Reason::aborted && error.rank == 1, "rank 1 has aborted");
    PYCOMM_CHECK(residual == std::vector<float>(kCount, 0.125f), "it must be what it was");
  });
}

// An abort before the end of an operation makes it fail, whatever it has found so far.
void the_last_look_counts() {
  const int fd = cpu::Window::create(1, 1 << 20, 64 << 10);
  const auto window = std::make_shared<cpu::Window>(fd, 1, 1 << 20, 64 << 10);
  const auto peers = std::make_shared<const cpu::Liveness>(
      std::vector{0}, std::vector<std::shared_ptr<cpu::Process>>(1));
  cpu::Comm comm(window, peers, 0, 1, 1, std::chrono::seconds(1), 0);
  comm.begin({}, nullptr, nullptr, nullptr);
  comm.finish();
  PYCOMM_CHECK(comm.completed() == 1, "the first operation is complete");
  comm.begin({}, nullptr, nullptr, nullptr);
  comm.abort(Reason::aborted, 0);
  PYCOMM_CHECK(error_of([&] { comm.finish(); }).reason == Reason::aborted, "too late");
  PYCOMM_CHECK(comm.completed() == 1, "the second is not");
}

// A failed rank gets its tensors back only when other ranks' kernels have ended.
void waits_for_kernels() {
  World world(3);
  std::atomic<bool> ended{false};
  for (const int r : {0, 1}) world[r].kernels_begin();  // rank 2 has never launched any
  world.run([&](int r) {
    if (r == 1) {
      while (world[r].abort_word() == 0) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ended = true;
      world[r].kernels_ended();
      return;
    }
    if (r == 0) {
      world[r].abort();
      world[r].kernels_ended();
      PYCOMM_CHECK(world[r].comm().wait_for_kernels(std::chrono::seconds(60)), "they end in time");
    } else {
      error_of([&] { sum(world[r], 10); });
    }
    PYCOMM_CHECK(ended, "rank 1's kernels were still running");
  });
}

void does_not_wait_for_ever() {
  World world(2);
  for (const int r : {0, 1}) world[r].kernels_begin();
  world[0].abort();
  const cpu::Comm& comm = world[0].comm();
  PYCOMM_CHECK(!comm.wait_for_kernels(std::chrono::milliseconds(20)), "rank 1's never end");
  const auto interrupt = [] { throw std::runtime_error("interrupted"); };
  try {
    comm.wait_for_kernels(std::chrono::seconds(60), interrupt);
  } catch (const std::runtime_error& error) {
    PYCOMM_CHECK(std::string(error.what()) == "interrupted", "the interrupt's own exception");
    PYCOMM_CHECK(error_of([&] { sum(world[0], 10); }).reason == Reason::aborted, "in bounded time");
    return;
  }
  throw std::runtime_error("a wait must be interruptible");
}

// This process, and one that does nothing.
class Neighbours {
 public:
  ~Neighbours() { kill_child(); }
  void kill_child() {
    if (child_ > 0) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
    child_ = 0;
  }
  cpu::Comm comm(int r) const {
    return cpu::Comm(window, peers_, r, 2, 1, std::chrono::seconds(60), 0);
  }

  const std::shared_ptr<cpu::Window> window = std::make_shared<cpu::Window>(
      cpu::Window::create(2, 1 << 20, 64 << 10), 2, 1 << 20, 64 << 10);

 private:
  static pid_t make_child() {
    const pid_t child = fork();
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (child == 0) pause();
    return child;
  }
  pid_t child_ = make_child();
  std::shared_ptr<const cpu::Liveness> peers_ = std::make_shared<const cpu::Liveness>(
      std::vector{getpid(), child_},
      std::vector{std::shared_ptr<cpu::Process>(), cpu::Process::find(child_)});
};

void does_not_wait_for_the_dead() {
  Neighbours neighbours;
  cpu::Comm mine = neighbours.comm(0), theirs = neighbours.comm(1);
  theirs.kernels_begin();
  neighbours.kill_child();
  PYCOMM_CHECK(mine.wait_for_kernels(std::chrono::seconds(60)), "its kernels are gone");
}

// Sanitizers need additional memory.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define PYCOMM_CAN_RUN_OUT_OF_MEMORY
// If there is no memory to detach a tensor from a peer, its owner waits for the peer.
void waits_if_it_cannot_detach() {
  Neighbours neighbours;
  cpu::Comm mine = neighbours.comm(0);
  std::byte* const x = neighbours.window->heap(0)->allocate(cpu::kPage);
  mine.begin({Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, 1024}, x,
             x, nullptr);
  mine.publish();
  std::atomic<std::uint32_t>& inside = neighbours.window->control(1).in_peers_heaps;
  inside = 1;
  rlimit before{};
  getrlimit(RLIMIT_DATA, &before);
  std::atomic<bool> left{false};
  std::thread peer([&] {
    std::this_thread::sleep_for(cpu::kRetreatWithin + std::chrono::milliseconds(300));
    left = true;
    inside = 0;
  });
  const rlimit none{1, before.rlim_max};  // zero would mean no limit
  setrlimit(RLIMIT_DATA, &none);
  std::exception_ptr error;
  try {
    mine.retreat();
  } catch (...) {
    error = std::current_exception();
  }
  const bool in_time = left;
  setrlimit(RLIMIT_DATA, &before);
  peer.join();
  if (error) std::rethrow_exception(error);
  PYCOMM_CHECK(in_time, "the peer was still there");
}
#endif

}  // namespace
}  // namespace pycomm::test

// Replaces the system's function.
extern "C" int sched_yield() noexcept {
  using pycomm::test::slow_yields;
  if (slow_yields < 0) return static_cast<int>(syscall(SYS_sched_yield));
  ++slow_yields;
  std::this_thread::sleep_for(std::chrono::microseconds(250));
  return 0;
}

int main() {
  using namespace pycomm::test;
  return run_all({{"yields while cores come back", yields_while_cores_come_back},
                  {"sleeps while others want the core", sleeps_while_others_want_the_core},
                  {"times out", times_out},
                  {"blames the silent rank", blames_the_silent},
                  {"notices who leaves", notices_who_leaves},
                  {"leaving after the last operation is fine", leaving_after_the_last_is_fine},
                  {"aborts", aborts},
                  {"disagreement is told to all", disagreement_is_told_to_all},
                  {"a failed work throws", a_failed_work_throws},
                  {"interrupts a wait", interrupts_a_wait},
                  {"a failed exchange puts residuals back", a_failed_exchange_puts_residuals_back},
                  {"the last look counts", the_last_look_counts},
                  {"waits for kernels", waits_for_kernels},
                  {"does not wait for ever", does_not_wait_for_ever},
#ifdef PYCOMM_CAN_RUN_OUT_OF_MEMORY
                  {"waits if it cannot detach", waits_if_it_cannot_detach},
#endif
                  {"does not wait for the dead", does_not_wait_for_the_dead}});
}

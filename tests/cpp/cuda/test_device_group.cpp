// A group's CUDA side together with its group on the host: what kernels and hosts tell each other,
// run on the CPU (device/cuda_runtime.h).
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "cuda/group.h"
#include "support/device_world.h"
#include "support/run_all.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kCount = 10'000;

Operation all_reduce(ReduceOp op = ReduceOp::sum) {
  return {Collective::all_reduce, Algorithm::automatic, DType::f32, op, 0, kCount};
}

class Interrupted : public std::exception {};

// Two ranks, each with a tensor of ones and a result of zeros. `together`: they share kernel
// launches.
struct Ranks {
  explicit Ranks(bool together, double timeout = 5, void (*interrupt)() = nullptr)
      : hosts(2, 64 << 10, 0, 5), device(2, timeout) {
    for (int r = 0; r < 2; ++r) {
      // The world owns the groups.
      const std::shared_ptr<cpu::Group> host(std::shared_ptr<void>(), &hosts[r]);
      groups.push_back(std::make_unique<cuda::Group>(
          host, device.endpoints[r], together ? device.shared : nullptr, interrupt));
      x.emplace_back(kCount, 1.0f);
      y.emplace_back(kCount, 0.0f);
    }
  }

  void run(int r, const Operation& operation = all_reduce()) {
    groups[r]->run({operation, x[r].data(), y[r].data()}, 0);
  }
  void run_both(const Operation& first, const Operation& second) {
    hosts.run([&](int r) { run(r, r == 0 ? first : second); });
  }

  World hosts;
  DeviceWorld device;
  std::vector<std::unique_ptr<cuda::Group>> groups;
  std::vector<std::vector<float>> x, y;
};

// Runs `body`, which must fail with this reason and rank, and with these words in the message.
void fails(const std::function<void()>& body, Reason reason, int rank, const std::string& words) {
  try {
    body();
  } catch (const CollectiveError& error) {
    const std::string text = error.what();
    PYCOMM_CHECK(error.reason == reason && error.rank == rank, "another error: " + text);
    PYCOMM_CHECK(text.find(words) != std::string::npos, "must say '" + words + "': " + text);
    return;
  }
  PYCOMM_CHECK(false, "must fail: " + words);
}

// The group has failed, and that error was already thrown once.
void refuses_work(Ranks& ranks, int r) {
  try {
    ranks.run(r);
  } catch (const cpu::GroupUnusable& error) {
    PYCOMM_CHECK(std::string(error.what()).find("failed") != std::string::npos, error.what());
    return;
  }
  PYCOMM_CHECK(false, "a group that has failed must refuse work");
}

void adds_up(bool together) {
  Ranks ranks(together);
  for (int i = 0; i < 2; ++i) ranks.run_both(all_reduce(), all_reduce());
  for (int r = 0; r < 2; ++r) {
    ranks.groups[r]->check();
    PYCOMM_CHECK(ranks.y[r] == std::vector<float>(kCount, 2.0f), "the sum of both ranks");
    ranks.groups[r]->close();
  }
}

// Rank 1 does not come: both ranks get an error, each from its own point of view.
void times_out() {
  Ranks ranks(false, 0.2);
  ranks.run(0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (ranks.hosts[1].abort_word() == 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  PYCOMM_CHECK(ranks.hosts[1].abort_word() != 0,
               "the others learn of it without a call of rank 0's");
  fails(
      [&] { ranks.groups[0]->check(); }, Reason::timeout, 1,
      "rank 1 (pid 0) did not answer within the timeout of the group: rank 0 waited 0.2 s for it");
  fails([&] { ranks.run(1); }, Reason::timeout, 1,
        "rank 0 waited 0.2 s for this one, rank 1 (pid 0), and gave up before it came");
  for (int r = 0; r < 2; ++r) refuses_work(ranks, r);
}

// The kernel of rank 0 waits for rank 1; meanwhile rank 1's host acts.
void ends_the_kernel(void (*act)(cpu::Group&), Reason reason, const std::string& words) {
  Ranks ranks(false);
  std::thread kernel([&] { ranks.run(0); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  const auto began = std::chrono::steady_clock::now();
  act(ranks.hosts[1]);
  kernel.join();
  PYCOMM_CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(3),
               "the kernel must end before it gives up by itself");
  fails([&] { ranks.groups[0]->check(); }, reason, 1, words);
  PYCOMM_CHECK(ranks.y[0] == std::vector<float>(kCount, 0.0f), "results stay as they were");
  PYCOMM_CHECK(ranks.hosts[0].comm().wait_for_kernels({}), "no kernel uses them any more");
  refuses_work(ranks, 0);
}

void disagree_apart() {
  Ranks ranks(false);
  ranks.run_both(all_reduce(), all_reduce(ReduceOp::max));
  for (int r = 0; r < 2; ++r) {
    fails([&] { ranks.groups[r]->check(); }, Reason::mismatch, 1,
          "rank 0 called all_reduce(float32, 10000 elements, op=sum, algorithm=one_shot, on CUDA), "
          "rank 1 called all_reduce(float32, 10000 elements, op=max");
    PYCOMM_CHECK(ranks.hosts[r].abort_word() == 0, "no rank has touched another one's tensors");
    refuses_work(ranks, r);
  }
}

void disagree_together() {
  Ranks ranks(true);
  ranks.hosts.run([&](int r) {
    fails([&] { ranks.run(r, all_reduce(r == 0 ? ReduceOp::sum : ReduceOp::max)); },
          Reason::mismatch, 1, "op=max");
  });
}

void overwritten_word() {
  Ranks ranks(false);
  ranks.hosts[0].abort(abort_word(Reason::timeout, 99));
  fails([&] { ranks.groups[0]->check(); }, Reason::malformed, -1, "overwritten");
}

// Rank 1 says that its kernels may use rank 0's tensors, and never takes it back.
void waits_for_the_others_kernels() {
  Ranks ranks(false, 5, [] { throw Interrupted(); });
  ranks.groups[1].reset();
  ranks.hosts[1].kernels_begin();
  ranks.hosts[1].abort();
  bool interrupted = false;
  try {
    ranks.groups[0]->check();
  } catch (const Interrupted&) {
    interrupted = true;
  }
  PYCOMM_CHECK(interrupted, "it must wait, and look for interrupts");
  ranks.hosts[1].kernels_ended();
  fails([&] { ranks.groups[0]->check(); }, Reason::aborted, 1, "aborted the group");
}

void refuses_what_does_not_fit() {
  Ranks ranks(false);
  Operation operation = all_reduce();
  operation.count = std::int64_t{1} << 30;
  operation.codec.kind = CodecKind::topk;
  operation.codec.k = 1u << 29;
  PYCOMM_CHECK(refused([&] { ranks.groups[0]->run({operation, nullptr, nullptr}, 0); }),
               "lists that are larger than the window");
  Call call{all_reduce(), ranks.x[0].data(), ranks.y[0].data()};
  call.timeout = 1;
  PYCOMM_CHECK(refused([&] { ranks.groups[0]->run(call, 0); }), "a timeout of its own");
  ranks.run_both(all_reduce(), all_reduce());  // no failure so far
  for (int r = 0; r < 2; ++r) ranks.groups[r]->check();
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all({
      {"adds up",
       [] {
         for (const bool together : {false, true}) adds_up(together);
       }},
      {"a timeout is told to both", times_out},
      {"an abort ends a kernel",
       [] {
         ends_the_kernel([](cpu::Group& host) { host.abort(); }, Reason::aborted,
                         "rank 1 (pid 0) aborted the group during all_reduce(float32");
       }},
      {"so does a rank that leaves",
       [] {
         ends_the_kernel([](cpu::Group& host) { host.leave(); }, Reason::peer_died,
                         "rank 1 (pid 0) died or left during all_reduce(float32");
       }},
      {"ranks disagree, each with its own launch", disagree_apart},
      {"ranks disagree before they launch together", disagree_together},
      {"a word that no rank writes", overwritten_word},
      {"check() waits for the others' kernels", waits_for_the_others_kernels},
      {"what does not fit is refused", refuses_what_does_not_fit},
  });
}

// A group's CUDA side together with its group on the host: what kernels and hosts tell each other,
// run on the CPU (device/cuda_runtime.h).
#include <cuda_runtime.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "cuda/group.h"
#include "cuda/runtime.cuh"
#include "support/device_world.h"
#include "support/run_all.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

const std::string kRank1 = "rank 1 (pid " + std::to_string(getpid()) + ")";

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
  const int queries = device::capture_queries(), events = device::recorded_events();
  for (int i = 0; i < 2; ++i) ranks.run_both(all_reduce(), all_reduce());
  PYCOMM_CHECK(device::capture_queries() == queries, "nothing captures the default stream");
  const int launches = together ? 2 : 4;
  PYCOMM_CHECK(device::recorded_events() - events == launches, "a launch records one event");
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
  fails([&] { ranks.groups[0]->check(); }, Reason::timeout, 1,
        kRank1 + " did not answer within the timeout: rank 0 waited 0.2 s for it");
  fails([&] { ranks.run(1); }, Reason::timeout, 1,
        "rank 0 waited 0.2 s for this rank, " + kRank1 + ", and gave up before it came");
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

// Rank 1's operation has work for one lane only. Rank 0's other lane must not wait for it until its
// time is up.
void disagree_about_lanes() {
  Ranks ranks(false, 30);
  Operation small = all_reduce();
  small.count = 4;
  const auto began = std::chrono::steady_clock::now();
  ranks.run_both(all_reduce(), small);
  for (const auto& endpoint : ranks.device.endpoints) endpoint->synchronize();
  PYCOMM_CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20),
               "all lanes hear of the mismatch");
  for (int r = 0; r < 2; ++r) {
    fails([&] { ranks.groups[r]->check(); }, Reason::mismatch, 1, "10000 elements");
  }
}

void disagree_together() {
  Ranks ranks(true);
  ranks.hosts.run([&](int r) {
    fails([&] { ranks.run(r, all_reduce(r == 0 ? ReduceOp::sum : ReduceOp::max)); },
          Reason::mismatch, 1, "op=max");
  });
}

// The last operation that rank r has launched, as the other one sees it.
std::optional<Launched> last_launch(Ranks& ranks, int r) {
  const std::vector<Launched> launched = ranks.hosts[1 - r].state(1).ranks[r].launched;
  return launched.empty() ? std::nullopt : std::optional(launched.back());
}

void wait_until(Ranks& ranks, int r, std::uint32_t number, Launched::State state) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (true) {
    const std::optional<Launched> last = last_launch(ranks, r);
    if (last && last->number == number && last->state == state) return;
    PYCOMM_CHECK(std::chrono::steady_clock::now() < deadline,
                 "operation " + std::to_string(number) + " is never in that state");
    std::this_thread::yield();
  }
}

// An int8 bucket is one launch, though its parts meet one after the other; so is one of top-k.
void run_bucket(Ranks& ranks, int r, CodecKind codec) {
  std::vector<cuda::Part> parts;
  std::vector<Call> calls;
  for (std::int64_t first = 0; first < kCount; first += kCount / 4) {
    Operation operation = all_reduce();
    operation.count = kCount / 4;
    operation.algorithm = Algorithm::two_shot;
    operation.codec.kind = codec;
    if (codec == CodecKind::int8) operation.codec.block = 256;
    if (codec == CodecKind::topk) operation.codec.k = 100;
    calls.push_back({operation, ranks.x[r].data() + first, ranks.y[r].data() + first});
    parts.push_back({operation});
  }
  std::vector<std::byte> workspace(static_cast<std::size_t>(cuda::workspace_bytes(parts, 2)));
  ranks.groups[r]->run(calls, 0, {{}, nullptr, workspace.data()});
}

// Others see what a rank has launched, and how far its device is.
void shows_progress(bool together) {
  using State = Launched::State;
  Ranks ranks(together, 20);
  ranks.run_both(all_reduce(), all_reduce());
  ranks.hosts.run([&](int r) { run_bucket(ranks, r, CodecKind::int8); });
  ranks.hosts.run([&](int r) { run_bucket(ranks, r, CodecKind::topk); });
  for (int r = 0; r < 2; ++r) {
    wait_until(ranks, r, 3, State::done);
    PYCOMM_CHECK(last_launch(ranks, r)->operation->codec.kind == CodecKind::topk, "the last one");
  }
  std::thread kernel([&] {
    ranks.hosts[0].set_subject("layers");
    ranks.run(0);
  });
  wait_until(ranks, 0, 4, together ? State::launched : State::running);
  PYCOMM_CHECK(last_launch(ranks, 0)->subject == "layers", "and what it is about");
  PYCOMM_CHECK(last_launch(ranks, 1)->number == 3, "rank 1 has not come to it");
  ranks.run(1);
  kernel.join();
  for (int r = 0; r < 2; ++r) wait_until(ranks, r, 4, State::done);
}

// A part of a bucket that fails leaves the whole launch where it was.
void shows_where_it_failed(CodecKind codec) {
  Ranks ranks(false, 0.2);
  ranks.run_both(all_reduce(), all_reduce());
  ranks.hosts[0].set_subject("layers");
  codec == CodecKind::none ? ranks.run(0) : run_bucket(ranks, 0, codec);
  try {
    ranks.groups[0]->check();
  } catch (const CollectiveError& error) {
    const std::string text = error.what();
    PYCOMM_CHECK(error.sequence == 2, "the number of the launch");
    PYCOMM_CHECK(text.find("; this rank exchanged layers") != std::string::npos, text);
    const std::vector<RankState>& told = error.group->ranks;
    const Launched &mine = told[0].launched.back(), &theirs = told[1].launched.back();
    PYCOMM_CHECK(mine.number == 2 && mine.state == Launched::State::running, "it is still in it");
    PYCOMM_CHECK(theirs.number == 1 && theirs.state == Launched::State::done, "rank 1 was not");
    ranks.groups[0]->close();
    PYCOMM_CHECK(last_launch(ranks, 0)->state == Launched::State::running, "also at the end");
    return;
  }
  PYCOMM_CHECK(false, "rank 1 does not come");
}

// What a graph has launched is done when it is replayed.
void shows_replays() {
  using State = Launched::State;
  Ranks ranks(false, 20);
  const cuda::DeviceGuard guard(DeviceWorld::kDevice);
  std::array<cudaStream_t, 2> streams{};
  std::array<cudaGraph_t, 2> graphs{};
  const int queries = device::capture_queries();
  for (std::size_t r = 0; r < 2; ++r) {
    cudaStreamCreate(&streams[r]);
    cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeRelaxed);
    ranks.groups[r]->run({all_reduce(), ranks.x[r].data(), ranks.y[r].data()},
                         reinterpret_cast<std::uintptr_t>(streams[r]));
    cudaStreamEndCapture(streams[r], &graphs[r]);
  }
  PYCOMM_CHECK(device::capture_queries() - queries == 2, "a launch asks once for the capture");
  ranks.run_both(all_reduce(), all_reduce());
  const auto captured = [&](std::size_t r) {
    const std::vector<Launched> all = ranks.hosts[0].state(8).ranks[r].launched;
    PYCOMM_CHECK(all.size() == 2 && all[0].captured && !all[1].captured, "the first is captured");
    return all[0];
  };
  for (int r = 0; r < 2; ++r) {
    wait_until(ranks, r, 2, State::done);
    PYCOMM_CHECK(captured(static_cast<std::size_t>(r)).state == State::launched, "not yet");
  }
  const auto replay = [&](std::size_t r) { cudaGraphLaunch(graphs[r], streams[r]); };
  std::thread kernel([&] { replay(0); });
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (captured(0).state != State::running) {
    PYCOMM_CHECK(std::chrono::steady_clock::now() < deadline, "the replay waits for rank 1");
    std::this_thread::yield();
  }
  PYCOMM_CHECK(captured(1).state == State::launched, "rank 1 has not come to it");
  replay(1);
  kernel.join();
  for (std::size_t r = 0; r < 2; ++r) ranks.groups[r]->close();
  for (std::size_t r = 0; r < 2; ++r) {
    PYCOMM_CHECK(captured(r).state == State::done, "it is done");
    cudaGraphDestroy(graphs[r]);
    cudaStreamDestroy(streams[r]);
  }
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
                         kRank1 + " aborted the group during all_reduce(float32");
       }},
      {"so does a rank that leaves",
       [] {
         ends_the_kernel([](cpu::Group& host) { host.leave(); }, Reason::peer_died,
                         kRank1 + " died or left during all_reduce(float32");
       }},
      {"progress is shown",
       [] {
         for (const bool together : {false, true}) shows_progress(together);
       }},
      {"a failure shows where it was",
       [] {
         for (const CodecKind codec : {CodecKind::none, CodecKind::int8, CodecKind::topk}) {
           shows_where_it_failed(codec);
         }
       }},
      {"so are replays", shows_replays},
      {"ranks disagree, each with its own launch", disagree_apart},
      {"ranks disagree about the lanes that work", disagree_about_lanes},
      {"ranks disagree before they launch together", disagree_together},
      {"a word that no rank writes", overwritten_word},
      {"check() waits for the others' kernels", waits_for_the_others_kernels},
      {"what does not fit is refused", refuses_what_does_not_fit},
  });
}

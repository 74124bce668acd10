// What becomes of the kernels of ranks that are processes when another rank is missing, dies or aborts
// the group, run on the CPU (support/mapped_world.h): they end, in every kind of operation, and say why.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "support/operations.h"
#include "support/rank_tensors.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kHeap = 8 << 20;
constexpr int kRanks = 3;

using Tell = std::function<void(MappedWorld&)>;

// Launches an operation on the first ranks of a group, and tells them that the last rank has left or
// stops. As hosts do, the first one whose kernel fails aborts the group.
void run(MappedWorld& world, OnDevice& tensors, int ranks, const Tell& tell) {
  std::atomic<int> running = ranks;
  std::vector<std::thread> kernels;
  for (int r = 0; r < ranks; ++r) {
    kernels.emplace_back([&, r] {
      tensors.launch(r, *world.endpoints[r]);
      --running;
    });
  }
  tell(world);
  while (running > 0) {
    const bool failed = std::ranges::any_of(
        world.endpoints, [](const auto& each) { return each->failure().reason != Reason::none; });
    for (const auto& each : world.endpoints) {
      if (failed) each->set_abort(abort_word(Reason::aborted, kRanks - 1));
    }
    std::this_thread::yield();
  }
  for (std::thread& kernel : kernels) kernel.join();
}

// Checks how a rank's kernels have ended; returns true if they have failed for `reason`, because of
// the last rank. Those that end later may fail because of the abort.
bool has_failed(const cuda::Endpoint& endpoint, const Operation& operation, Reason reason) {
  const cuda::Failure failure = endpoint.failure();
  const bool expected = failure.reason == reason && failure.rank == kRanks - 1;
  PYCOMM_CHECK(expected || failure.reason == Reason::none || failure.reason == Reason::aborted,
               describe(operation) + " fails for reason " +
                   std::to_string(static_cast<int>(failure.reason)) + " of rank " +
                   std::to_string(failure.rank));
  PYCOMM_CHECK(!endpoint.in_peers_heaps(), "no lane uses other ranks' tensors any more");
  return reason == Reason::aborted ? failure.reason == reason : expected;
}

// An operation of every kind, on `count` floats, and one in packets.
std::vector<Operation> operations(std::int64_t count) {
  std::vector<Operation> made = all_operations(count);
  made.push_back(packets(300));
  return made;
}

// The last rank never comes. The others learn why by `tell`, or by their own deadlines.
void never_comes(Reason reason, double timeout, const Tell& tell) {
  for (const Operation& operation : operations(20'000)) {
    MappedWorld world(kRanks, kHeap, timeout);
    const Tensors before(operation, kRanks, 1);
    OnDevice tensors(operation, before, world, Room::mixed, 1);
    run(world, tensors, kRanks - 1, tell);
    bool told = false;
    for (int r = 0; r < kRanks - 1; ++r) {
      told |= has_failed(*world.endpoints[r], operation, reason);
      PYCOMM_CHECK(world.endpoints[r]->failure().reason != Reason::none, "all ranks must fail");
      tensors.expect(r, before, " that has failed");
    }
    PYCOMM_CHECK(told, describe(operation) + ": the first rank to fail knows why");
  }
}

// The last rank stops at some place within the operation, or just after it.
void stops_halfway(Room room) {
  Dice dice(7);
  int stopped = 0;
  for (const Operation& operation : operations(300'000)) {
    MappedWorld world(kRanks, kHeap);
    const Tensors before(operation, kRanks, 1);
    OnDevice tensors(operation, before, world, room, 1);
    const auto began = std::chrono::steady_clock::now();
    run(world, tensors, kRanks, [&](MappedWorld&) {
      std::this_thread::sleep_for(std::chrono::microseconds(roll(dice, 5'000)));
      world.endpoints[kRanks - 1]->set_abort(abort_word(Reason::aborted, kRanks - 1));
      for (int r = 0; r < kRanks - 1; ++r) world.endpoints[r]->set_gone(kRanks - 1);
    });
    PYCOMM_CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(30),
                 describe(operation) + ": kernels must end before their deadlines");
    stopped += has_failed(*world.endpoints[kRanks - 1], operation, Reason::aborted);
    for (int r = 0; r < kRanks - 1; ++r) {
      has_failed(*world.endpoints[r], operation, Reason::peer_died);
    }
  }
  PYCOMM_CHECK(stopped > 0, "some operations must be stopped before they end");
}

// The last rank announces a barrier, and then leaves. Who has seen only that it is gone has to look once
// more whether it had come.
void comes_and_leaves() {
  const Operation barrier{Collective::barrier, Algorithm::two_shot, DType::u8, ReduceOp::sum, 0, 0};
  device::let_loads_be_late(true);
  for (int i = 0; i < 15; ++i) {
    DeviceWorld world(2);
    const cuda::WindowLayout layout{2, kLanes, DeviceWorld::staging_bytes(2)};
    const auto line = [&](int to, int from) -> Announcement& {
      return *reinterpret_cast<Announcement*>(world.windows[to] + layout.announcement(0, 1, from));
    };
    line(0, 1).operation = barrier;
    std::jthread kernel([&] { world.endpoints[0]->launch(barrier, nullptr, nullptr, 0); });
    const std::atomic_ref waits(line(1, 0).epoch), comes(line(0, 1).epoch);
    while (waits.load() == 0) std::this_thread::yield();
    comes.store(1, std::memory_order_release);
    world.endpoints[0]->set_gone(1);
    kernel.join();
    PYCOMM_CHECK(world.endpoints[0]->failure().reason == Reason::none, "it has come");
  }
  device::let_loads_be_late(false);
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all({
      {"a rank that never comes", [] { never_comes(Reason::timeout, 0.05, [](MappedWorld&) {}); }},
      {"a rank that has died",
       [] {
         never_comes(Reason::peer_died, 60, [](MappedWorld& world) {
           for (const auto& each : world.endpoints) each->set_gone(kRanks - 1);
         });
       }},
      {"a rank that has come and left", comes_and_leaves},
      {"an abort",
       [] {
         never_comes(Reason::aborted, 60, [](MappedWorld& world) {
           for (const auto& each : world.endpoints) {
             each->set_abort(abort_word(Reason::aborted, kRanks - 1));
           }
         });
       }},
      {"a rank stops halfway",
       [] {
         for (const Room room : {Room::heap, Room::outside}) stops_halfway(room);
       }},
  });
}

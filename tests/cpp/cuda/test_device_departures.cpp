// What becomes of the kernels of ranks that are processes when another rank is missing, dies or aborts
// the group, run on the CPU (support/mapped_world.h): they end, in every kind of operation, and say why.
#include <atomic>
#include <chrono>
#include <thread>

#include "support/operations.h"
#include "support/rank_tensors.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kHeap = 8 << 20;
constexpr int kRanks = 3;

std::vector<cuda::Endpoint*> all_but_the_last(const MappedWorld& world) {
  return {world.endpoints[0].get(), world.endpoints[1].get()};
}

void has_failed(const cuda::Endpoint& endpoint, const Operation& operation, Reason reason,
                int rank) {
  const cuda::Failure failure = endpoint.failure();
  PYCOMM_CHECK(failure.reason == reason && failure.rank == rank,
               describe(operation) + " fails for reason " +
                   std::to_string(static_cast<int>(failure.reason)) + " of rank " +
                   std::to_string(failure.rank));
  PYCOMM_CHECK(!endpoint.in_peers_heaps(), "no lane uses other ranks' tensors any more");
}

// The last rank never comes. The others learn why by `tell`, or by their own deadlines.
void never_comes(Reason reason, double timeout, void (*tell)(cuda::Endpoint&)) {
  for (const Operation& operation : all_operations(20'000)) {
    MappedWorld world(kRanks, kHeap, timeout);
    const Tensors before(operation, kRanks, 1);
    OnDevice tensors(operation, before, world, Room::mixed, 1);
    std::vector<std::thread> kernels;
    for (int r = 0; r < kRanks - 1; ++r) {
      kernels.emplace_back([&, r] { tensors.launch(r, *world.endpoints[r]); });
    }
    for (cuda::Endpoint* const each : all_but_the_last(world)) tell(*each);
    for (std::thread& kernel : kernels) kernel.join();
    for (int r = 0; r < kRanks - 1; ++r) {
      has_failed(*world.endpoints[r], operation, reason,
                 reason == Reason::aborted ? r : kRanks - 1);
      tensors.expect(r, before, " that has failed");
    }
  }
}

// The last rank stops at some place within the operation. As hosts do, the first one to learn of it
// aborts the group. All kernels end long before their deadlines.
void stops_halfway(Room room) {
  Dice dice(7);
  for (const Operation& operation : all_operations(300'000)) {
    MappedWorld world(kRanks, kHeap);
    const Tensors before(operation, kRanks, 1);
    OnDevice tensors(operation, before, world, room, 1);
    std::atomic<int> running = kRanks;
    std::vector<std::thread> kernels;
    for (int r = 0; r < kRanks; ++r) {
      kernels.emplace_back([&, r] {
        tensors.launch(r, *world.endpoints[r]);
        --running;
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(roll(dice, 30'000)));
    world.endpoints[kRanks - 1]->set_abort(abort_word(Reason::aborted, kRanks - 1));
    for (cuda::Endpoint* const each : all_but_the_last(world)) each->set_gone(kRanks - 1);
    const auto began = std::chrono::steady_clock::now();
    while (running > 0) {
      bool failed = false;
      for (const auto& each : world.endpoints) failed |= each->failure().reason != Reason::none;
      if (failed) {
        for (const auto& each : world.endpoints) each->set_abort(abort_word(Reason::peer_died, 2));
      }
      std::this_thread::yield();
    }
    for (std::thread& kernel : kernels) kernel.join();
    PYCOMM_CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(30),
                 describe(operation) + ": kernels must end before their deadlines");
    has_failed(*world.endpoints[kRanks - 1], operation, Reason::aborted, kRanks - 1);
    for (int r = 0; r < kRanks - 1; ++r) {
      const Reason reason = world.endpoints[r]->failure().reason;
      PYCOMM_CHECK(
          reason == Reason::none || reason == Reason::peer_died || reason == Reason::aborted,
          describe(operation) + " ends for another reason");
      PYCOMM_CHECK(!world.endpoints[r]->in_peers_heaps(), "no lane uses other ranks' tensors");
    }
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all({
      {"a rank that never comes",
       [] { never_comes(Reason::timeout, 0.05, [](cuda::Endpoint&) {}); }},
      {"a rank that has died",
       [] {
         never_comes(Reason::peer_died, 60,
                     [](cuda::Endpoint& each) { each.set_gone(kRanks - 1); });
       }},
      {"an abort",
       [] {
         never_comes(Reason::aborted, 60, [](cuda::Endpoint& each) {
           each.set_abort(abort_word(Reason::aborted, kRanks - 1));
         });
       }},
      {"a rank stops halfway",
       [] {
         for (const Room room : {Room::heap, Room::outside}) stops_halfway(room);
       }},
  });
}

// How kernels end when the group is aborted, run on the CPU (device/cuda_runtime.h).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "core/algorithms/packet.h"
#include "core/errors.h"
#include "cuda/codecs/wire.h"
#include "cuda/layout.h"
#include "support/device_world.h"
#include "support/operations.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kCount = 40'000;
constexpr std::uint64_t kAbort = abort_word(Reason::timeout, 1);

Operation all_reduce(Algorithm algorithm, CodecKind codec = CodecKind::none) {
  Operation operation = packets(kCount);
  operation.algorithm = algorithm;
  operation.codec.kind = codec;
  if (codec == CodecKind::int8) operation.codec.block = 256;
  operation.codec.k = 400;
  return operation;
}

// Ranks, each with a tensor of ones and a result of zeros.
struct Ranks {
  explicit Ranks(int n, bool staged = false, double timeout = 60) : world(n, timeout, staged) {
    for (int r = 0; r < n; ++r) {
      x.emplace_back(kCount, 1.0f);
      y.emplace_back(kCount, 0.0f);
    }
  }

  void launch_together(const Operation& operation) {
    std::vector<std::vector<std::byte>> workspaces;
    for (int r = 0; r < size(); ++r) {
      workspaces.emplace_back(
          static_cast<std::size_t>(cuda::workspace_bytes({{operation}}, size())));
      world.shared->put(
          r, operation, x[r].data(), y[r].data(), 0,
          cuda::Bucket{{{operation, x[r].data(), y[r].data()}}, nullptr, workspaces.back().data()});
    }
    world.shared->launch();
  }

  // Ranks with a GPU each launch a kernel each.
  void launch_alone(int r, const Operation& operation) {
    world.endpoints[r]->launch(operation, x[r].data(), y[r].data(), 0);
  }

  int size() const { return static_cast<int>(x.size()); }

  DeviceWorld world;
  std::vector<std::vector<float>> x, y;
};

void fails_as_aborted(const cuda::Endpoint& endpoint, const Operation& operation) {
  const cuda::Failure failure = endpoint.failure();
  PYCOMM_CHECK(failure.reason == Reason::aborted, describe(operation) + " must fail");
  PYCOMM_CHECK(failure.first == operation, "the failure tells which operation");
  PYCOMM_CHECK(!endpoint.in_peers_heaps(), "no lane uses other ranks' tensors any more");
}

// An abort that arrives when no wait polls for it any more, or in an operation without waits.
void the_last_look_counts(int n, const Operation& operation) {
  Ranks ranks(n, true);
  ranks.launch_together(operation);
  for (const auto& endpoint : ranks.world.endpoints) {
    PYCOMM_CHECK(endpoint->failure().reason == Reason::none, "nobody has aborted the group");
    endpoint->set_abort(kAbort);
  }
  for (const auto& y : ranks.y) {
    PYCOMM_CHECK(y[0] == static_cast<float>(n), describe(operation) + " must add up");
  }
  ranks.launch_together(operation);
  for (const auto& endpoint : ranks.world.endpoints) fails_as_aborted(*endpoint, operation);
}

// Ranks call different operations, of which at least one travels in packets. No tensor changes, although
// packets of both may have come.
void tells_what_differs(const Operation& first, const Operation& other) {
  Ranks ranks(2, true);
  std::jthread second([&] { ranks.launch_alone(1, other); });
  ranks.launch_alone(0, first);
  second.join();
  for (const auto& endpoint : ranks.world.endpoints) {
    const cuda::Failure failure = endpoint->failure();
    PYCOMM_CHECK(failure.reason == Reason::mismatch && failure.rank == 1,
                 describe(first) + " and " + describe(other) + " must not match");
    PYCOMM_CHECK(failure.first == first && failure.other == other, "the failure tells both");
  }
  for (const auto& y : ranks.y) {
    PYCOMM_CHECK(y == std::vector<float>(kCount, 0.0f), "results stay as they were");
  }
}

void succeeds_in_packets(const Ranks& ranks, int r, std::int64_t count) {
  PYCOMM_CHECK(ranks.world.endpoints[r]->failure().reason == Reason::none, "it must succeed");
  std::vector<float> sum(kCount, 0.0f);
  std::fill_n(sum.begin(), count, static_cast<float>(ranks.size()));
  PYCOMM_CHECK(ranks.y[r] == sum, "the sum of ones");
}

// A rank whose packets do not come soon is waited for. The other one has published the operation by then.
void is_waited_for() {
  Ranks ranks(2, false, 20);
  const cuda::WindowLayout layout{2, kLanes, DeviceWorld::staging_bytes(2)};
  std::jthread early([&] { ranks.launch_alone(0, packets(300)); });
  auto& line =
      *reinterpret_cast<Announcement*>(ranks.world.windows[1] + layout.announcement(0, 1, 0));
  const auto has_failed = [&] {
    return ranks.world.endpoints[0]->failure().reason != Reason::none;
  };
  while (std::atomic_ref(line.epoch).load() != 1 && !has_failed()) std::this_thread::yield();
  ranks.launch_alone(1, packets(300));
  early.join();
  for (int r = 0; r < 2; ++r) succeeds_in_packets(ranks, r, 300);
}

// Packets stay where they are, whatever becomes of the rank that has sent them.
void a_late_rank_finds_all_packets() {
  Ranks ranks(2, false, 0.1);
  ranks.launch_alone(0, packets(300));
  const cuda::Failure failure = ranks.world.endpoints[0]->failure();
  PYCOMM_CHECK(failure.reason == Reason::timeout && failure.rank == 1, "rank 1 has not come");
  PYCOMM_CHECK(ranks.y[0] == std::vector<float>(kCount, 0.0f), "results stay as they were");
  ranks.world.endpoints[0]->set_abort(kAbort);
  ranks.launch_alone(1, packets(300));
  succeeds_in_packets(ranks, 1, 300);
}

// After 2^32 - 2 operations their numbers come again. Then no packet of an old operation is left.
void a_packet_is_taken_once() {
  Ranks ranks(2);
  const cuda::WindowLayout layout{2, kLanes, DeviceWorld::staging_bytes(2)};
  for (int i = 0; i < 2; ++i) ranks.launch_together(packets(300));
  for (const std::uintptr_t window : ranks.world.windows) {
    for (const std::uint32_t parity : {0u, 1u}) {
      const auto* packet = reinterpret_cast<std::uint64_t*>(window + layout.packets(parity, 0));
      const auto* end = reinterpret_cast<std::uint64_t*>(window + layout.packets(parity, 2));
      for (; packet != end; ++packet) {
        const std::uint32_t number = packet_sequence(*packet);
        PYCOMM_CHECK(number == 0 || number % 2 != parity, "a number that is no operation's here");
      }
    }
  }
}

// A lane that sees the abort does not start to use other ranks' tensors.
void stays_outside(int n, Algorithm algorithm) {
  Ranks ranks(n);
  for (const auto& endpoint : ranks.world.endpoints) endpoint->set_abort(kAbort);
  const Operation operation = all_reduce(algorithm);
  ranks.launch_together(operation);
  for (int r = 0; r < n; ++r) {
    fails_as_aborted(*ranks.world.endpoints[r], operation);
    PYCOMM_CHECK(ranks.y[r] == std::vector<float>(kCount, 0.0f), "results stay as they were");
  }
}

// Writes rank 1's announcement of the first operation for rank 0.
void announce_to_rank_0(const Ranks& ranks, const Operation& operation) {
  const cuda::WindowLayout layout{2, kLanes, DeviceWorld::staging_bytes(2)};
  for (int lane = 0; lane < kLanes; ++lane) {
    auto& line =
        *reinterpret_cast<Announcement*>(ranks.world.windows[0] + layout.announcement(lane, 1, 1));
    line.operation = operation;
    line.input = reinterpret_cast<std::int64_t>(ranks.x[1].data());
    line.output = reinterpret_cast<std::int64_t>(ranks.y[1].data());
    std::atomic_ref(line.epoch).store(1, std::memory_order_release);
  }
}

// The host sees that a kernel uses other ranks' tensors until that kernel has ended.
void is_seen_inside(Algorithm algorithm) {
  Ranks ranks(2);
  cuda::Endpoint& endpoint = *ranks.world.endpoints[0];
  const Operation operation = all_reduce(algorithm);
  PYCOMM_CHECK(!endpoint.in_peers_heaps(), "nothing has been launched");
  announce_to_rank_0(ranks, operation);
  std::thread kernel([&] { endpoint.launch(operation, ranks.x[0].data(), ranks.y[0].data(), 0); });
  while (!endpoint.in_peers_heaps()) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  PYCOMM_CHECK(endpoint.in_peers_heaps(), "it waits inside for rank 1");
  endpoint.set_abort(kAbort);
  kernel.join();
  fails_as_aborted(endpoint, operation);
}

// The host has not heard of the timeout yet. Rank 0's later operations, which fail at once, must not
// look like the announcement that rank 1 waits for.
void a_late_rank_leaves_tensors_alone(Algorithm algorithm) {
  Ranks ranks(2, false, 0.1);
  const Operation operation = all_reduce(algorithm);
  for (int i = 0; i < 3; ++i) ranks.launch_alone(0, operation);
  ranks.launch_alone(1, operation);
  for (int r = 0; r < 2; ++r) {
    const cuda::Failure failure = ranks.world.endpoints[r]->failure();
    PYCOMM_CHECK(failure.reason == Reason::timeout && failure.rank == 1 - r,
                 "each misses the other");
    PYCOMM_CHECK(ranks.y[r] == std::vector<float>(kCount, 0.0f), "results stay as they were");
  }
}

// A later operation may have no work for the lane that has failed. It fails all the same.
void a_failed_lane_fails_operations_without_it() {
  Ranks ranks(2);
  const cuda::WindowLayout layout{2, kLanes, DeviceWorld::staging_bytes(2)};
  for (const std::uintptr_t window : ranks.world.windows) {
    reinterpret_cast<cuda::LaneState*>(window + layout.state(kLanes - 1))->failed = 1;
  }
  Operation operation = all_reduce(Algorithm::two_shot);
  operation.count = 4;  // for the first lane only
  ranks.launch_together(operation);
  for (int r = 0; r < 2; ++r) {
    PYCOMM_CHECK(ranks.y[r][0] == 0.0f, "results stay as they were");
    const auto* first =
        reinterpret_cast<cuda::LaneState*>(ranks.world.windows[r] + layout.state(0));
    PYCOMM_CHECK(first->failed == 1, "the first lane has run, and fails, too");
  }
}

void is_not_launched_once_a_rank_has_given_up() {
  Ranks ranks(2);
  const Operation operation = all_reduce(Algorithm::two_shot);
  for (int r = 0; r < 2; ++r) {
    ranks.world.shared->put(r, operation, ranks.x[r].data(), ranks.y[r].data(), 0);
  }
  ranks.world.shared->launch([] { return true; });
  for (int r = 0; r < 2; ++r) ranks.world.shared->follow(r);
  PYCOMM_CHECK(ranks.y[0] == std::vector<float>(kCount, 0.0f), "no kernel has run");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all({
      {"the last look counts",
       [] {
         for (const int n : {1, 2}) {
           for (const Algorithm algorithm :
                {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
             the_last_look_counts(n, all_reduce(algorithm));
           }
           for (const CodecKind codec : {CodecKind::int8, CodecKind::topk}) {
             the_last_look_counts(n, all_reduce(Algorithm::two_shot, codec));
           }
           the_last_look_counts(n, packets(300));
         }
       }},
      {"a mismatch in packets",
       [] {
         Operation largest = packets(100);
         largest.op = ReduceOp::max;
         for (const Operation& other :
              {packets(0), packets(99), packets(300), largest, all_reduce(Algorithm::two_shot)}) {
           tells_what_differs(packets(100), other);
           tells_what_differs(other, packets(100));
         }
         largest.count = 512;
         tells_what_differs(packets(512), largest);
       }},
      {"a rank is waited for",
       [] {
         for (int i = 0; i < 8; ++i) is_waited_for();
       }},
      {"a late rank finds all packets", a_late_rank_finds_all_packets},
      {"a packet is taken once", a_packet_is_taken_once},
      {"an aborted kernel stays outside",
       [] {
         for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
           for (const int n : {1, 2}) stays_outside(n, algorithm);
         }
       }},
      {"a failed lane fails operations without it", a_failed_lane_fails_operations_without_it},
      {"a kernel is seen inside",
       [] {
         for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring}) {
           is_seen_inside(algorithm);
         }
       }},
      {"a late rank leaves tensors alone",
       [] {
         for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
           a_late_rank_leaves_tensors_alone(algorithm);
         }
       }},
      {"not launched once a rank has given up", is_not_launched_once_a_rank_has_given_up},
  });
}

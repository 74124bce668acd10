// What kernels tell of the times of operations, run on the CPU (device/cuda_runtime.h), and how the host
// reads it.
#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "cuda/codecs/wire.h"
#include "cuda/timing.h"
#include "support/device_world.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kCount = 3'000;

using Ring = std::array<cuda::Timing, cuda::kTimings>;
using Clock = std::chrono::steady_clock;

Operation all_reduce(CodecKind codec = CodecKind::none, Algorithm algorithm = Algorithm::two_shot,
                     std::int64_t count = kCount) {
  Operation operation{Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, count};
  operation.codec.kind = codec;
  if (codec == CodecKind::int8) operation.codec.block = 256;
  if (codec == CodecKind::topk) operation.codec.k = 30;
  return operation;
}

// As kernels do; the word `missing` is still on its way. The operation takes twice as many nanoseconds as its number
// plus one, half of them for the exchange. It begins before the clock passes a multiple of 2^48.
void write(Ring& ring, std::uint32_t number, std::size_t missing = cuda::Timing::kWords) {
  const std::uint64_t taken = 2 * (std::uint64_t{number} + 1);
  const std::uint64_t end = (std::uint64_t{6} << 58) + 1;
  const std::uint64_t values[] = {end - taken, end - taken / 2, end, 4 * kCount,
                                  cuda::kind_word(all_reduce(CodecKind::int8))};
  for (std::size_t i = 0; i < cuda::Timing::kWords; ++i) {
    if (i == missing) continue;
    ring[number % cuda::kTimings].words[i] = cuda::timing_word(number, values[i]);
  }
}

std::vector<std::uint32_t> read(cuda::TimingReader& reader, const Ring& ring) {
  std::vector<std::uint32_t> numbers;
  while (const auto timed = reader.next(ring.data())) {
    PYCOMM_CHECK(timed->whole == 2 * timed->exchange && timed->bytes == 4 * kCount &&
                     timed->collective == Collective::all_reduce && timed->codec == CodecKind::int8,
                 "all words are of one operation");
    numbers.push_back(static_cast<std::uint32_t>(timed->exchange - 1));
  }
  return numbers;
}

void reads_whole_operations_in_order() {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  PYCOMM_CHECK(read(reader, *ring).empty(), "nothing has been written");
  write(*ring, 0);
  write(*ring, 1);
  write(*ring, 2, 4);
  PYCOMM_CHECK((read(reader, *ring) == std::vector<std::uint32_t>{0, 1}), "two are whole");
  write(*ring, 2);
  PYCOMM_CHECK((read(reader, *ring) == std::vector<std::uint32_t>{2}), "and then the third");
  PYCOMM_CHECK(read(reader, *ring).empty(), "each is read once");
}

// A reader that keeps pace misses nothing. When it looks first, the word `missing` is on its way.
void goes_round(std::uint32_t first, std::uint32_t rounds, std::size_t missing) {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  std::uint32_t number = first;
  if (first != 0) {  // it has been behind, and finds a round
    while (number != first + cuda::kTimings) write(*ring, number++);
    PYCOMM_CHECK(read(reader, *ring).back() == number - 1, "a round is read");
  }
  for (; number != first + rounds * cuda::kTimings; ++number) {
    write(*ring, number, missing);
    PYCOMM_CHECK(read(reader, *ring).empty(), "none is read that is not whole");
    write(*ring, number);
    PYCOMM_CHECK(read(reader, *ring) == std::vector<std::uint32_t>{number}, "each is read");
  }
}

void who_is_behind_misses_the_oldest() {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  write(*ring, 0);
  PYCOMM_CHECK(read(reader, *ring).size() == 1, "one is read");
  constexpr std::uint32_t kWritten = 3 * cuda::kTimings + 77;
  for (std::uint32_t number = 1; number < kWritten; ++number) write(*ring, number);
  const std::vector<std::uint32_t> numbers = read(reader, *ring);
  PYCOMM_CHECK(numbers.size() == cuda::kTimings && numbers.back() == kWritten - 1,
               "those that are there");
  PYCOMM_CHECK(std::is_sorted(numbers.begin(), numbers.end()), "in order");
  write(*ring, kWritten);
  PYCOMM_CHECK(read(reader, *ring) == std::vector<std::uint32_t>{kWritten}, "and the next");
}

// Ranks, each with a bucket of tensors.
struct Ranks {
  Ranks(int n, std::vector<Operation> operations) : world(n) {
    for (int r = 0; r < n; ++r) {
      auto& tensors = x.emplace_back(2 * operations.size(), std::vector<float>(kCount, 1.0f));
      std::vector<cuda::Part>& parts = buckets.emplace_back().parts;
      for (std::size_t i = 0; i < operations.size(); ++i) {
        parts.push_back({operations[i], tensors[2 * i].data(), tensors[2 * i + 1].data()});
      }
      workspaces.emplace_back(static_cast<std::size_t>(cuda::workspace_bytes(parts, n)));
      buckets.back().workspace = workspaces.back().data();
    }
  }

  void put_and_launch() {
    for (int r = 0; r < size(); ++r) {
      const cuda::Part first = buckets[r].parts[0];
      world.shared->put(r, whole(), first.input, first.output, 0, buckets[r]);
    }
    world.shared->launch();
  }
  void launch_alone(int r) {
    const cuda::Part first = buckets[r].parts[0];
    cuda::Extras extras(buckets[r]);
    extras.number = 1;
    world.endpoints[r]->launch(whole(), first.input, first.output, 0, extras);
  }
  Operation whole() const { return cuda::whole_of(buckets[0].parts); }
  int size() const { return static_cast<int>(buckets.size()); }

  DeviceWorld world;
  std::vector<std::vector<std::vector<float>>> x;
  std::vector<cuda::Bucket> buckets;
  std::vector<std::vector<std::byte>> workspaces;
};

// However many meetings it has.
void an_operation_counts_once(int n, const Operation& operation, std::size_t parts) {
  constexpr int kOperations = 3;
  Ranks ranks(n, std::vector<Operation>(parts, operation));
  const auto begin = Clock::now();
  for (int i = 0; i < kOperations; ++i) ranks.put_and_launch();
  const std::int64_t most = std::chrono::nanoseconds(Clock::now() - begin).count();
  for (const auto& endpoint : ranks.world.endpoints) {
    std::int64_t sum = 0;
    for (int i = 0; i < kOperations; ++i) {
      const auto timed = endpoint->next_timed();
      PYCOMM_CHECK(timed && timed->collective == Collective::all_reduce &&
                       timed->codec == operation.codec.kind,
                   "each operation counts");
      PYCOMM_CHECK(timed->bytes == static_cast<std::int64_t>(parts) * operation.count * 4,
                   "with all its tensors");
      PYCOMM_CHECK(0 < timed->exchange && timed->exchange <= timed->whole, "and has times");
      sum += timed->whole;
    }
    PYCOMM_CHECK(sum <= most, "which lie one after the other");
    PYCOMM_CHECK(!endpoint->next_timed(), "once");
  }
}

// Rank 1 launches a while after rank 0's kernel has told that it is there.
void tells_who_has_waited() {
  Ranks ranks(2, {all_reduce()});
  cuda::Endpoint &first = *ranks.world.endpoints[0], &second = *ranks.world.endpoints[1];
  std::jthread early([&] { ranks.launch_alone(0); });
  while (first.progress()[0] != begun_word(1)) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // for its clock's next reading
  const auto begin = Clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::int64_t waited = std::chrono::nanoseconds(Clock::now() - begin).count();
  ranks.launch_alone(1);
  early.join();
  const auto long_one = first.next_timed(), short_one = second.next_timed();
  PYCOMM_CHECK(long_one && short_one, "both have ended");
  PYCOMM_CHECK(long_one->whole - long_one->exchange >= waited, "rank 0 has waited for rank 1");
  PYCOMM_CHECK(short_one->whole < long_one->whole, "rank 1 has not waited");
}

void failures_are_not_told() {
  Ranks ranks(2, {all_reduce()});
  ranks.put_and_launch();
  for (const auto& endpoint : ranks.world.endpoints) {
    PYCOMM_CHECK(endpoint->next_timed().has_value(), "the first one has succeeded");
    endpoint->set_abort(abort_word(Reason::timeout, 1));
  }
  ranks.put_and_launch();
  for (const auto& endpoint : ranks.world.endpoints) {
    PYCOMM_CHECK(!endpoint->next_timed(), "the second one has failed");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  using pycomm::Algorithm, pycomm::CodecKind;
  constexpr auto kLastRounds = static_cast<std::uint32_t>(pycomm::cuda::kTimingRounds) - 3;
  return run_all(
      {{"whole operations are read in order", reads_whole_operations_in_order},
       {"the ring goes round, the first word late", [] { goes_round(0, 4, 0); }},
       {"the ring goes round, the last word late", [] { goes_round(0, 4, 4); }},
       {"rounds go round", [] { goes_round(kLastRounds * pycomm::cuda::kTimings, 6, 2); }},
       {"operations go round", [] { goes_round(0u - 2 * pycomm::cuda::kTimings, 4, 2); }},
       {"who is behind misses the oldest", who_is_behind_misses_the_oldest},
       {"a plain operation", [] { an_operation_counts_once(2, all_reduce(), 1); }},
       {"one rank", [] { an_operation_counts_once(1, all_reduce(), 1); }},
       {"packets",
        [] {
          const auto small = all_reduce(CodecKind::none, Algorithm::one_shot, 100);
          an_operation_counts_once(3, small, 1);
        }},
       {"a bucket of int8", [] { an_operation_counts_once(2, all_reduce(CodecKind::int8), 3); }},
       {"a bucket of top-k", [] { an_operation_counts_once(2, all_reduce(CodecKind::topk), 2); }},
       {"who has waited", tells_who_has_waited},
       {"failures are not told", failures_are_not_told}});
}

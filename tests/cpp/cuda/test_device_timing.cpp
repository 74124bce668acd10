// What kernels tell of the times of operations, run on the CPU (device/cuda_runtime.h), and how the host
// reads it.
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

Operation all_reduce(CodecKind codec = CodecKind::none) {
  Operation operation{
      Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::sum, 0, kCount};
  operation.codec.kind = codec;
  if (codec == CodecKind::int8) operation.codec.block = 256;
  if (codec == CodecKind::topk) operation.codec.k = 30;
  return operation;
}

// As kernels do. The meeting takes as many nanoseconds as its number, half of them for the exchange.
void write(Ring& ring, std::uint32_t sequence, bool last = true, std::size_t words = 5) {
  const std::uint64_t begun = 1'000'000 + 1'000 * std::uint64_t{sequence};
  const std::uint64_t values[] = {begun, begun + sequence / 2, begun + sequence, 4 * kCount,
                                  cuda::kind_word(all_reduce(CodecKind::int8), last)};
  for (std::size_t i = 0; i < words; ++i) {
    ring[sequence % cuda::kTimings].words[i] = cuda::timing_word(sequence, values[i]);
  }
}

std::vector<std::int64_t> wholes(cuda::TimingReader& reader, const Ring& ring) {
  std::vector<std::int64_t> all;
  while (const auto timed = reader.next(ring.data())) all.push_back(timed->whole);
  return all;
}

void reads_meetings_in_order() {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  PYCOMM_CHECK(wholes(reader, *ring).empty(), "nothing has been written");
  write(*ring, 1);
  write(*ring, 2);
  write(*ring, 3, true, 4);
  PYCOMM_CHECK((wholes(reader, *ring) == std::vector<std::int64_t>{1, 2}), "two are whole");
  write(*ring, 3);
  const auto timed = reader.next(ring->data());
  PYCOMM_CHECK(timed && timed->whole == 3 && timed->exchange == 2 && timed->bytes == 4 * kCount &&
                   timed->collective == Collective::all_reduce && timed->codec == CodecKind::int8,
               "all that was written");
  PYCOMM_CHECK(!reader.next(ring->data()), "each is read once");
}

// The times are from the first meeting's beginning to the last one's end.
void meetings_of_an_operation_are_one() {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  write(*ring, 1, false);
  write(*ring, 2, false);
  PYCOMM_CHECK(!reader.next(ring->data()), "the operation goes on");
  write(*ring, 3);
  const auto timed = reader.next(ring->data());
  PYCOMM_CHECK(timed && timed->whole == 2'003 && timed->exchange == 2'003, "three meetings");
}

// Past the largest round, and the reader misses nothing.
void goes_round() {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  constexpr auto kRounds = static_cast<std::uint32_t>(cuda::kTimingRounds);
  std::uint32_t sequence = (kRounds - 4) * cuda::kTimings;
  while (sequence < (kRounds - 3) * cuda::kTimings) write(*ring, sequence++);
  PYCOMM_CHECK(wholes(reader, *ring).back() == sequence - 1, "a round is read");
  for (; sequence < (kRounds + 2) * cuda::kTimings; ++sequence) {
    write(*ring, sequence);
    const auto timed = reader.next(ring->data());
    PYCOMM_CHECK(timed && timed->whole == sequence, "each is read");
  }
  PYCOMM_CHECK(!reader.next(ring->data()), "none is read twice");
}

void who_is_behind_misses_the_oldest() {
  const auto ring = std::make_unique<Ring>();
  cuda::TimingReader reader;
  write(*ring, 1, false);
  PYCOMM_CHECK(!reader.next(ring->data()), "the operation goes on");
  constexpr std::uint32_t kWritten = 3 * cuda::kTimings + 77;
  for (std::uint32_t sequence = 2; sequence <= kWritten; ++sequence) write(*ring, sequence);
  const std::vector<std::int64_t> read = wholes(reader, *ring);
  PYCOMM_CHECK(read.size() <= cuda::kTimings && read.size() + 100 > cuda::kTimings,
               "those that are there, got " + std::to_string(read.size()));
  PYCOMM_CHECK(read.back() == kWritten, "up to the newest");
  for (std::size_t i = 1; i < read.size(); ++i) {
    PYCOMM_CHECK(read[i] == read[i - 1] + 1, "in order");
  }
  write(*ring, kWritten + 1);
  PYCOMM_CHECK(wholes(reader, *ring) == std::vector<std::int64_t>{kWritten + 1}, "and the next");
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

  void launch_together() {
    for (int r = 0; r < size(); ++r) {
      const cuda::Part first = buckets[r].parts[0];
      world.shared->put(r, whole(), first.input, first.output, 0, buckets[r]);
    }
    world.shared->launch();
  }
  void launch_alone(int r) {
    const cuda::Part first = buckets[r].parts[0];
    world.endpoints[r]->launch(whole(), first.input, first.output, 0, buckets[r]);
  }
  Operation whole() const { return cuda::whole_of(buckets[0].parts); }
  int size() const { return static_cast<int>(buckets.size()); }

  DeviceWorld world;
  std::vector<std::vector<std::vector<float>>> x;
  std::vector<cuda::Bucket> buckets;
  std::vector<std::vector<std::byte>> workspaces;
};

// However many meetings it has.
void an_operation_counts_once(CodecKind codec, std::size_t parts) {
  constexpr int kOperations = 3;
  Ranks ranks(2, std::vector<Operation>(parts, all_reduce(codec)));
  for (int i = 0; i < kOperations; ++i) ranks.launch_together();
  for (const auto& endpoint : ranks.world.endpoints) {
    for (int i = 0; i < kOperations; ++i) {
      const auto timed = endpoint->next_timed();
      PYCOMM_CHECK(timed && timed->collective == Collective::all_reduce && timed->codec == codec,
                   "each operation counts");
      PYCOMM_CHECK(timed->bytes == static_cast<std::int64_t>(parts) * kCount * 4,
                   "with all its tensors");
      PYCOMM_CHECK(0 < timed->exchange && timed->exchange <= timed->whole, "and has times");
    }
    PYCOMM_CHECK(!endpoint->next_timed(), "once");
  }
}

void tells_who_has_waited() {
  constexpr auto kLate = std::chrono::milliseconds(50);
  constexpr std::int64_t kLateNs = std::chrono::nanoseconds(kLate).count();
  Ranks ranks(2, {all_reduce()});
  std::jthread early([&] { ranks.launch_alone(0); });
  std::this_thread::sleep_for(kLate);
  ranks.launch_alone(1);
  early.join();
  const auto first = ranks.world.endpoints[0]->next_timed();
  const auto second = ranks.world.endpoints[1]->next_timed();
  PYCOMM_CHECK(first && second, "both have ended");
  PYCOMM_CHECK(first->whole - first->exchange > kLateNs / 2, "rank 0 has waited for rank 1");
  PYCOMM_CHECK(second->whole - second->exchange < kLateNs / 2, "rank 1 has not waited");
}

void failures_are_not_told() {
  Ranks ranks(2, {all_reduce()});
  for (const auto& endpoint : ranks.world.endpoints) {
    endpoint->set_abort(abort_word(Reason::timeout, 1));
  }
  ranks.launch_together();
  for (const auto& endpoint : ranks.world.endpoints) {
    PYCOMM_CHECK(!endpoint->next_timed(), "the operation has failed");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  using pycomm::CodecKind;
  return run_all(
      {{"meetings are read in order", reads_meetings_in_order},
       {"meetings of an operation are one", meetings_of_an_operation_are_one},
       {"the ring goes round", goes_round},
       {"who is behind misses the oldest", who_is_behind_misses_the_oldest},
       {"a plain operation counts once", [] { an_operation_counts_once(CodecKind::none, 1); }},
       {"a bucket of int8 counts once", [] { an_operation_counts_once(CodecKind::int8, 3); }},
       {"a bucket of top-k counts once", [] { an_operation_counts_once(CodecKind::topk, 2); }},
       {"who has waited", tells_who_has_waited},
       {"failures are not told", failures_are_not_told}});
}

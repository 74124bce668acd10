// The kernels of ranks that are processes, run on the CPU (support/mapped_world.h): every collective,
// algorithm, type, reduction and codec, among 1 to 8 ranks, with tensors in and outside of heaps at
// any address, eager and in graphs. They must give the bits of the CPU's executors.
#include <cuda_runtime.h>

#include <functional>

#include "core/call.h"
#include "support/messages.h"
#include "support/operations.h"
#include "support/rank_tensors.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kHeap = 4 << 20, kHostStaging = 8 << 20;

class Processes {
 public:
  explicit Processes(int n) : hosts_(n, kHostStaging), device_(n, kHeap) {}

  // Runs it once on CUDA and once on the CPU, and compares.
  void compare(const Operation& operation, Room room = Room::heap,
               Numbers numbers = Numbers::normal) {
    const unsigned seed = ++seed_;
    Tensors want(operation, hosts_.size(), seed, numbers);
    want.in_place = numbers == Numbers::whole && seed / 2 % 2 == 0;
    OnDevice got(operation, want, device_, room, seed);
    run_on_host(operation, hosts_, want);
    hosts_.run([&](int r) { got.launch(r, *device_.endpoints[r]); });
    expect(got, want, ", case " + std::to_string(seed));
  }

  void extend() { device_.extend(); }

  Bytes staging_of(int r) const {
    std::byte* const end = device_.first_heap(r);
    return {end - DeviceWorld::staging_bytes(hosts_.size()), end};
  }

  // All ranks get the same bits, whatever these are.
  void compare_ranks(const Operation& operation, Room room) {
    const unsigned seed = ++seed_;
    OnDevice got(operation, Tensors(operation, hosts_.size(), seed), device_, room, seed);
    hosts_.run([&](int r) { got.launch(r, *device_.endpoints[r]); });
    const Bytes first = got.result(0);
    for (int r = 1; r < hosts_.size(); ++r) {
      PYCOMM_CHECK(got.has_result(r, first), describe(operation) + ": ranks differ");
    }
  }

  // Captures all of them in one graph per rank, and runs it again and again. No rank waits for another
  // one in between. `meanwhile` runs between capture and replays.
  void replay(
      const std::vector<Operation>& operations, int times, Room room = Room::outside,
      const std::function<void()>& meanwhile = [] {}) {
    std::vector<Tensors> want;
    std::vector<OnDevice> got;
    for (const Operation& operation : operations) {
      want.emplace_back(operation, hosts_.size(), ++seed_);
      want.back().in_place = operation.collective == Collective::all_reduce;
      got.emplace_back(operation, want.back(), device_, room, seed_);
    }
    std::vector<cudaStream_t> streams(hosts_.size());
    std::vector<cudaGraph_t> graphs(hosts_.size());
    hosts_.run([&](int r) {
      cudaStreamCreate(&streams[r]);
      cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeRelaxed);
      for (OnDevice& each : got) each.launch(r, *device_.endpoints[r], streams[r]);
      PYCOMM_CHECK(cudaStreamEndCapture(streams[r], &graphs[r]) == cudaSuccess, "a capture ends");
    });
    meanwhile();
    hosts_.run([&](int r) {
      for (int i = 0; i < times; ++i) cudaGraphLaunch(graphs[r], streams[r]);
      cudaGraphDestroy(graphs[r]);
      cudaStreamDestroy(streams[r]);
    });
    for (std::size_t i = 0; i < operations.size(); ++i) {
      for (int time = 0; time < times; ++time) run_on_host(operations[i], hosts_, want[i]);
      expect(got[i], want[i], " after replays");
    }
  }

 private:
  void expect(const OnDevice& got, const Tensors& want, const std::string& when) const {
    for (int r = 0; r < static_cast<int>(want.x.size()); ++r) {
      PYCOMM_CHECK(device_.endpoints[r]->failure().reason == Reason::none, "failed" + when);
      got.expect(r, want, when);
    }
  }

  World hosts_;
  MappedWorld device_;
  unsigned seed_ = 0;
};

// Types and reductions take turns. `extended`: tensors lie in memory that was added to the heaps.
void collectives(int n, bool extended) {
  Processes ranks(n);
  if (extended) ranks.extend();
  unsigned turn = static_cast<unsigned>(n);
  for (const std::int64_t count : {0, 1, 3001, 20'011}) {
    for (const Room room : {Room::heap, Room::outside, Room::mixed}) {
      if (room != Room::heap && count < 2) continue;
      for (Operation operation : plain_operations()) {
        if (operation.algorithm == Algorithm::multicast) continue;  // multicasts()
        operation.dtype = static_cast<DType>(++turn % kCountOf<DType>);
        operation.op = static_cast<ReduceOp>(turn / 2 % 5);
        operation.root = static_cast<int>(turn % static_cast<unsigned>(n));
        operation.count = operation.collective == Collective::barrier ? 0 : count;
        ranks.compare(operation, room);
      }
    }
  }
}

constexpr DType kCompressible[] = {DType::f32, DType::f16, DType::bf16};

// Sums of whole numbers are exact in any order; others have the same bits on all ranks. Tensors at the
// same places are not staged.
void multicasts(int n, bool extended) {
  Processes ranks(n);
  if (extended) ranks.extend();
  unsigned turn = static_cast<unsigned>(n);
  for (const std::int64_t count : {0, 1, 3001, 300'007}) {
    for (const Room room : {Room::alike, Room::aligned, Room::heap, Room::outside, Room::mixed}) {
      const DType dtype = kCompressible[++turn % 3];
      const ReduceOp op = turn / 3 % 2 == 0 ? ReduceOp::sum : ReduceOp::avg;
      const Operation operation{Collective::all_reduce, Algorithm::multicast, dtype, op, 0, count};
      const Bytes before = ranks.staging_of(0);
      ranks.compare(operation, room, Numbers::whole);
      must(room != Room::alike || ranks.staging_of(0) == before, "it is used where it lies");
      ranks.compare_ranks(operation, room);
    }
  }
}

// On CUDA, ring and tree cut at multiples of the largest block, on the CPU at multiples of the
// codec's. So that both cut at the same places, blocks are of that size, or all parts are.
void codecs(int n) {
  Processes ranks(n);
  unsigned turn = static_cast<unsigned>(n);
  const auto compare = [&](Algorithm algorithm, const Codec& codec, std::int64_t count) {
    const Room room = ++turn % 2 == 0 ? Room::heap : Room::outside;
    ranks.compare(compressed(algorithm, kCompressible[turn % 3], codec, count), room);
  };
  for (const std::int64_t count : {1, 30'011}) {
    for (const Codec& codec : {int8(256, true), int8(128, false), cast(),
                               top(count / 20 + 1, DType::f32), top(count / 50 + 1, DType::u8)}) {
      compare(Algorithm::two_shot, codec, count);
    }
  }
  for (const Algorithm algorithm : {Algorithm::ring, Algorithm::tree}) {
    for (const bool feedback : {false, true}) {
      compare(algorithm, int8(kLargestBlock, feedback), 30'011);
    }
    compare(algorithm, cast(), 2 * kLargestBlock * n * kLanes);
  }
}

// Every kernel that reduces or compresses. One-shot has others for packets.
void every_kernel() {
  Processes ranks(2);
  std::vector<Operation> operations = plain_operations();
  for (Operation& each : operations) each.count = each.collective == Collective::barrier ? 0 : 301;
  operations.push_back(packets(201));
  operations.front().count = 2'301;
  for (Operation operation : operations) {
    for (int d = 0; d < kCountOf<DType>; ++d) {
      for (int o = 0; o < kCountOf<ReduceOp>; ++o) {
        operation.dtype = static_cast<DType>(d);
        operation.op = static_cast<ReduceOp>(o);
        if (refusal_of({operation}, 2).empty()) ranks.compare(operation);
      }
    }
  }
  for (const DType dtype : kCompressible) {
    for (const Algorithm algorithm : {Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
      ranks.compare(compressed(algorithm, dtype, int8(kLargestBlock, true), 9001));
    }
    ranks.compare(compressed(Algorithm::two_shot, dtype, top(30, DType::bf16), 9001));
  }
}

// The largest tensors in packets, and smaller ones: the last item of a tensor may be whole or not.
void packet_sizes(int n) {
  Processes ranks(n);
  const std::pair<DType, std::int64_t> sizes[] = {
      {DType::f32, 1},    {DType::f32, 470},  {DType::f32, 471}, {DType::f32, 511},
      {DType::f32, 512},  {DType::i64, 255},  {DType::i64, 256}, {DType::f16, 1'023},
      {DType::u8, 2'041}, {DType::u8, 2'047}, {DType::u8, 2'048}};
  for (const auto& [dtype, count] : sizes) {
    Operation operation = packets(count);
    operation.dtype = dtype;
    PYCOMM_CHECK(cuda::fits_packets(operation), describe(operation) + " travels in packets");
    for (const Room room : {Room::heap, Room::mixed}) ranks.compare(operation, room);
    for (int i = 0; i < 2; ++i) {  // not in place, and in place
      ranks.compare(operation, Room::outside, Numbers::whole);
    }
  }
}

// All-reduces are done in place, so that a replay starts with the results and residuals of the last.
void replays(int n) {
  Processes ranks(n);
  std::vector<Operation> operations;
  for (const Operation& operation : all_operations(1001)) {
    operations.push_back(operation);
    const auto packed = static_cast<std::int64_t>(operations.size() * 7 % 5);  // none, or up to two
    for (std::int64_t i = 0; i < packed / 2; ++i) operations.push_back(packets(40 * packed + i));
  }
  for (Operation& operation : operations) operation.op = ReduceOp::avg;
  ranks.replay(operations, 80);
}

// Graphs that were captured before stay valid, and work beside operations that use what was added.
void replays_beside_extensions() {
  Processes ranks(3);
  const Operation sum{
      Collective::all_reduce, Algorithm::two_shot, DType::f32, ReduceOp::avg, 0, 5001};
  for (int i = 0; i < 3; ++i) {
    ranks.replay({sum}, 3, Room::heap, [&] {
      ranks.extend();
      ranks.compare(sum, Room::heap);
    });
  }
}

// Messages are fetched from other ranks' heaps, and from nowhere else.
void copies_of_messages() {
  constexpr std::int64_t kBytes = 1000;
  MappedWorld world(2, kHeap);
  const auto mine = world.endpoints[0]->message_copies();
  const auto theirs = world.endpoints[1]->message_copies();
  std::vector<std::byte> sent(kBytes);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i % 251);
  std::int64_t last = 0;
  for (int extended = 0; extended < 2; ++extended) {
    if (extended) world.extend();
    std::vector<std::byte> received(kBytes);
    last = theirs->place_of(world.heap(1) + kHeap - kBytes, kBytes);
    DeviceCopies::Mark mark = theirs->put(last, sent.data(), kBytes);
    while (!theirs->passed(mark)) continue;
    must(std::equal(sent.begin(), sent.end(), world.heap(1) + kHeap - kBytes), "it is put there");
    mark = mine->fetch(received.data(), 1, last, kBytes);
    while (!mine->passed(mark)) continue;
    must(mark == nullptr && received == sent, "the other rank's bytes must arrive");
  }
  std::vector<std::byte> received(kBytes);
  must(theirs->place_of(sent.data(), kBytes) == kNotInWindow, "others cannot use private memory");
  const std::int64_t first = theirs->slots().begin;
  for (const std::int64_t place : {first - 1, last + 1, std::int64_t{-1}, kHeap << 20}) {
    must(refused([&] { mine->fetch(received.data(), 1, place, kBytes); }),
         "a place outside of the heap must be refused");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  std::vector<std::pair<const char*, std::function<void()>>> tests{{"every kernel", every_kernel}};
  for (int n = 1; n <= 8; ++n) {
    tests.push_back({"collectives", [n] { collectives(n, n == 3); }});
    tests.push_back({"codecs", [n] { codecs(n); }});
    if (n == 4 || n == 5) tests.push_back({"packets", [n] { packet_sizes(n); }});
    if (n > 1 && n < 5) tests.push_back({"multicasts", [n] { multicasts(n, n == 3); }});
  }
  tests.push_back({"replays", [] { replays(2); }});
  tests.push_back({"replays beside extensions", replays_beside_extensions});
  tests.push_back({"copies_of_messages", copies_of_messages});
  return run_all(tests);
}

// Captured operations, and what is loaded before kernels can wait, on the CPU (device/cuda_runtime.h).
#include <cuda_runtime.h>

#include <array>

#include "core/errors.h"
#include "cuda/codecs/wire.h"
#include "cuda/runtime.cuh"
#include "support/device_world.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kCount = 3'000;
constexpr int kReplays = 100;

// An all-reduce of every rank's tensor. The sum replaces the tensor, so that every run counts.
struct AllReduce {
  explicit AllReduce(Algorithm algorithm, float value, CodecKind codec = CodecKind::none)
      : operation{Collective::all_reduce, algorithm, DType::f32, ReduceOp::avg, 0, kCount} {
    operation.codec.kind = codec;
    if (codec == CodecKind::int8) operation.codec.block = 256;
    operation.codec.k = kCount;
    for (int r = 0; r < kRanks; ++r) {
      x.emplace_back(kCount, value + static_cast<float>(r));
      y.emplace_back(kCount, 0.0f);
      workspaces.emplace_back(
          static_cast<std::size_t>(cuda::workspace_bytes({{operation}}, kRanks)));
    }
  }

  void launch(DeviceWorld& world, cudaStream_t stream) { launch(world, {stream, stream}); }
  void launch(DeviceWorld& world, const std::array<cudaStream_t, kRanks>& streams) {
    for (int r = 0; r < kRanks; ++r) {
      const auto handle = reinterpret_cast<std::uintptr_t>(streams[r]);
      cuda::Extras extras(
          cuda::Bucket{{{operation, x[r].data(), y[r].data()}}, nullptr, workspaces[r].data()});
      extras.capture = world.endpoints[r]->capture_of(handle);
      world.shared->put(r, operation, x[r].data(), y[r].data(), handle, extras);
    }
    world.shared->launch();
    for (int r = 0; r < kRanks; ++r) world.shared->follow(r);
  }

  void expect(float average, const char* when) const {
    for (const auto& each : y) {
      PYCOMM_CHECK(each == std::vector<float>(kCount, average), describe(operation) + when);
    }
  }

  Operation operation;
  std::vector<std::vector<float>> x, y;
  std::vector<std::vector<std::byte>> workspaces;
};

// Two streams, of which the second takes part in the first one's capture.
class TwoStreams {
 public:
  TwoStreams() {
    const cuda::DeviceGuard guard(DeviceWorld::kDevice);
    for (cudaStream_t& stream : streams) cudaStreamCreate(&stream);
    cudaEventCreateWithFlags(&event_, 0);
  }
  ~TwoStreams() {
    for (const cudaStream_t stream : streams) cudaStreamDestroy(stream);
    cudaEventDestroy(event_);
  }
  TwoStreams(const TwoStreams&) = delete;
  TwoStreams& operator=(const TwoStreams&) = delete;

  void begin() {
    cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed);
    wait(1, 0);
  }
  cudaGraph_t end() {
    wait(0, 1);
    cudaGraph_t graph = nullptr;
    PYCOMM_CHECK(cudaStreamEndCapture(streams[0], &graph) == cudaSuccess, "a capture ends");
    return graph;
  }

  cudaStream_t streams[2];

 private:
  void wait(int waiting, int other) {
    cudaEventRecord(event_, streams[other]);
    PYCOMM_CHECK(cudaStreamWaitEvent(streams[waiting], event_, 0) == cudaSuccess, "streams join");
  }

  cudaEvent_t event_ = nullptr;
};

// Neither the graph nor the streams order the operations; the group must.
void streams_of_a_capture_take_turns(Algorithm algorithm) {
  DeviceWorld world(kRanks);
  TwoStreams two;
  AllReduce eager(algorithm, 1), first(algorithm, 2), second(algorithm, 3), third(algorithm, 4);
  eager.launch(world, nullptr);
  two.begin();
  first.launch(world, two.streams[0]);
  second.launch(world, two.streams[1]);
  third.launch(world, two.streams[0]);
  const cudaGraph_t graph = two.end();
  PYCOMM_CHECK(device::in_one_order(*graph), "captured operations must not run at the same time");
  for (int i = 0; i < kReplays; ++i) {
    for (AllReduce* const each : {&first, &second, &third}) {
      for (auto& y : each->y) std::fill(y.begin(), y.end(), 0.0f);
    }
    PYCOMM_CHECK(cudaGraphLaunch(graph, nullptr) == cudaSuccess, "a graph runs");
    if (i % 10 == 0) eager.launch(world, nullptr);  // counts with the graph
    first.expect(2.5f, " in a replay");
    second.expect(3.5f, " in a replay");
    third.expect(4.5f, " in a replay");
    eager.expect(1.5f, " between replays");
  }
  cudaGraphDestroy(graph);
}

// The ranks' streams order the launch with what is before and after it on each of them.
void ranks_have_streams_of_their_own() {
  DeviceWorld world(kRanks);
  for (const std::size_t later : {0u, 1u}) {
    TwoStreams two;
    AllReduce one(Algorithm::one_shot, 1);
    float before = 0, after = 0;
    two.begin();
    cudaMemcpyAsync(&before, &one.x[1][0], sizeof(float), cudaMemcpyDefault, two.streams[1]);
    one.launch(world, {two.streams[0], two.streams[1]});
    cudaMemcpyAsync(&after, &one.y[later][0], sizeof(float), cudaMemcpyDefault, two.streams[later]);
    const cudaGraph_t graph = two.end();
    PYCOMM_CHECK(device::in_one_order(*graph), "the launch is between the copies");
    cudaGraphLaunch(graph, nullptr);
    PYCOMM_CHECK(before == 2 && after == 1.5f, "and the copies run, too");
    cudaGraphDestroy(graph);
  }
  TwoStreams two;
  AllReduce eager(Algorithm::one_shot, 1);
  const int events = device::recorded_events();
  eager.launch(world, {two.streams[0], nullptr});
  eager.expect(1.5f, " of a rank on the default stream");
  PYCOMM_CHECK(device::recorded_events() - events == 4, "each stream, and the launch for both");
}

// Two captures at the same time do not wait for each other, which CUDA forbids.
void captures_are_apart() {
  DeviceWorld world(kRanks);
  TwoStreams one, other;
  AllReduce a(Algorithm::ring, 1), b(Algorithm::ring, 2), c(Algorithm::ring, 3);
  one.begin();
  a.launch(world, one.streams[0]);
  other.begin();
  b.launch(world, other.streams[0]);
  c.launch(world, one.streams[1]);
  const cudaGraph_t graphs[] = {one.end(), other.end()};
  for (const cudaGraph_t graph : graphs) {
    PYCOMM_CHECK(device::in_one_order(*graph), "a capture's operations take turns");
    cudaGraphLaunch(graph, nullptr);
  }
  a.expect(1.5f, " of the first capture");
  b.expect(2.5f, " of the second capture");
  c.expect(3.5f, " of the first capture");
  for (const cudaGraph_t graph : graphs) cudaGraphDestroy(graph);
}

void kernels_are_loaded_before_they_run() {
  DeviceWorld world(kRanks);
  for (const CodecKind codec : {CodecKind::none, CodecKind::int8, CodecKind::topk}) {
    AllReduce(Algorithm::two_shot, 1, codec).launch(world, nullptr);
  }
  for (const Algorithm algorithm : {Algorithm::one_shot, Algorithm::ring, Algorithm::tree}) {
    AllReduce(algorithm, 1).launch(world, nullptr);
  }
  PYCOMM_CHECK(device::unloaded_launches() == 0, "no kernel is loaded while others may wait");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm;
  using namespace pycomm::test;
  return run_all({
      {"streams of a capture take turns",
       [] {
         for (const Algorithm algorithm :
              {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring, Algorithm::tree}) {
           streams_of_a_capture_take_turns(algorithm);
         }
       }},
      {"ranks have streams of their own", ranks_have_streams_of_their_own},
      {"captures are apart", captures_are_apart},
      {"kernels are loaded before they run", kernels_are_loaded_before_they_run},
  });
}

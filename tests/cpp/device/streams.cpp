// The implementation of cuda_runtime.h: streams, events and captures.
#include <algorithm>
#include <atomic>
#include <random>
#include <utility>
#include <vector>

#include "../support/dice.h"
#include "cuda_runtime.h"

// The work of a capture. A node runs after others, which have smaller numbers.
struct Graph {
  struct Node {
    std::function<void()> work;
    std::vector<std::size_t> after;
  };
  std::vector<Node> nodes;
  std::vector<Stream*> streams;  // those that take part in the capture
  unsigned long long id;
};

namespace {

// Some nodes of a graph, or work that has been done if there is no graph.
struct Point {
  Graph* graph = nullptr;
  std::vector<std::size_t> nodes;
};

bool holds(const std::vector<std::size_t>& nodes, std::size_t node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

// Some nodes and all that must run before them.
std::vector<std::size_t> up_to(const Graph& graph, std::vector<std::size_t> nodes) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const std::size_t node : graph.nodes[nodes[i]].after) {
      if (!holds(nodes, node)) nodes.push_back(node);
    }
  }
  return nodes;
}

}  // namespace

struct Stream {
  Point end;
  const int device = device::current_device();
  device::Actor* const actor = device::make_actor();  // does the stream's work
};

struct Event {
  Point at;
  const int device = device::current_device();
};

namespace {

constexpr int kDevices = 8;

// A stream, or the default one of the current device.
device::Actor* actor_of(Stream* stream) {
  static device::Actor* of_devices[kDevices];
  if (stream != nullptr) return stream->actor;
  device::Actor*& actor = of_devices[device::current_device()];
  if (actor == nullptr) actor = device::make_actor();
  return actor;
}

// Does a stream's work, after what the host has done so far.
template <class Work>
void run_on(Stream* stream, const Work& work) {
  device::Actor* const actor = actor_of(stream);
  device::publish(actor);
  device::Actor* const host = device::become(actor);
  device::observe(actor);
  work();
  device::become(host);
}

// The host waits for a stream.
void wait_for(Stream* stream) {
  const std::uint64_t done = 0;
  run_on(stream, [&done] { device::publish(&done); });
  device::observe(&done);
}

std::atomic<int> enqueued_so_far = 0, capture_queries_so_far = 0, recorded_so_far = 0;
thread_local std::vector<Stream*> created;  // on this thread, and not destroyed

}  // namespace

int device::enqueued() { return enqueued_so_far; }
int device::capture_queries() { return capture_queries_so_far; }
int device::recorded_events() { return recorded_so_far; }

void device::enqueue(Stream* stream, std::function<void()> work) {
  ++enqueued_so_far;
  if (stream == nullptr || stream->end.graph == nullptr) {
    auto* const its_own = new std::function<void()>(std::move(work));
    return run_on(stream, [its_own] {
      (*its_own)();
      delete its_own;
    });
  }
  Graph& graph = *stream->end.graph;
  graph.nodes.push_back({std::move(work), stream->end.nodes});
  stream->end.nodes = {graph.nodes.size() - 1};
}

bool device::in_one_order(const Graph& graph) {
  for (std::size_t node = 1; node < graph.nodes.size(); ++node) {
    if (!holds(up_to(graph, {node}), node - 1)) return false;
  }
  return true;
}

// Waits for the default stream and for those that this thread has created.
cudaError_t cudaDeviceSynchronize() {
  wait_for(nullptr);
  for (Stream* const stream : created) {
    if (stream->device == device::current_device()) wait_for(stream);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  wait_for(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  cudaStreamCreateWithFlags(stream, 0);
  created.push_back(*stream);
  return cudaSuccess;
}

// Whoever enqueues work on it waits for the work itself, and any thread may destroy it.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int) {
  *stream = new Stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::erase(created, stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int,
                            cudaStream_t stream) {
  device::enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, int) {
  const Point& point = event->at;
  run_on(stream, [event] { device::observe(event); });
  if (stream == nullptr)
    return point.graph == nullptr ? cudaSuccess : cudaErrorStreamCaptureIsolation;
  Point& end = stream->end;
  if (end.graph == nullptr && point.graph != nullptr) {  // the stream joins the capture
    end.graph = point.graph;
    end.graph->streams.push_back(stream);
  }
  if (end.graph != point.graph) return cudaErrorStreamCaptureIsolation;
  for (const std::size_t node : point.nodes) {
    if (!holds(end.nodes, node)) end.nodes.push_back(node);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  ++capture_queries_so_far;
  const bool captured = stream != nullptr && stream->end.graph != nullptr;
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (captured) *id = stream->end.graph->id;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> captures = 0;
  stream->end = {new Graph{{}, {stream}, ++captures}, {}};
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->end.graph;
  // The stream that began the capture must have waited for all work in it.
  const bool joined = up_to(**graph, stream->end.nodes).size() == (*graph)->nodes.size();
  for (Stream* const each : std::exchange((*graph)->streams, {})) each->end = {};
  return joined ? cudaSuccess : cudaErrorStreamCaptureUnjoined;
}

cudaError_t cudaGraphLaunch(cudaGraph_t graph, cudaStream_t stream) {
  static thread_local pycomm::test::Dice random(std::random_device{}());
  std::vector<std::size_t> order;
  while (order.size() < graph->nodes.size()) {
    const std::size_t node = random() % graph->nodes.size();
    const auto& after = graph->nodes[node].after;
    const bool ready = std::all_of(after.begin(), after.end(),
                                   [&](std::size_t before) { return holds(order, before); });
    if (ready && !holds(order, node)) order.push_back(node);
  }
  // One after the other: ThreadSanitizer does not see which nodes a graph leaves without order.
  run_on(stream, [&] {
    for (const std::size_t node : order) graph->nodes[node].work();
  });
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) {
  *event = new Event;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ++recorded_so_far;
  const int device = stream == nullptr ? device::current_device() : stream->device;
  if (event->device != device) return cudaErrorInvalidResourceHandle;
  run_on(stream, [event] { device::publish(event); });
  event->at = stream == nullptr ? Point{} : stream->end;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  device::observe(event);
  return event->at.graph == nullptr ? cudaSuccess : cudaErrorCapturedEvent;
}

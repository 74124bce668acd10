// The implementation of cuda_runtime.h: streams, events and captures.
#include <algorithm>
#include <atomic>
#include <random>
#include <utility>
#include <vector>

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
};

struct Event {
  Point at;
};

void device::enqueue(Stream* stream, std::function<void()> work) {
  if (stream == nullptr || stream->end.graph == nullptr) return work();
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

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new Stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, int) {
  const Point& point = event->at;
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

cudaError_t cudaGraphLaunch(cudaGraph_t graph, cudaStream_t) {
  static thread_local std::mt19937 random(std::random_device{}());
  std::vector<std::size_t> order;
  while (order.size() < graph->nodes.size()) {
    const std::size_t node = random() % graph->nodes.size();
    const auto& after = graph->nodes[node].after;
    const bool ready = std::all_of(after.begin(), after.end(),
                                   [&](std::size_t before) { return holds(order, before); });
    if (ready && !holds(order, node)) order.push_back(node);
  }
  for (const std::size_t node : order) graph->nodes[node].work();
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
  event->at = stream == nullptr ? Point{} : stream->end;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->at.graph == nullptr ? cudaSuccess : cudaErrorCapturedEvent;
}

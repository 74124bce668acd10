// torch's CUDA devices in host memory, for a torch without CUDA: allocator, streams and events. The work of streams is
// done at once, so they are only names; stream_order.h finds what would go wrong if it were not.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda/multimem.cuh"
#include "device.h"

// In place of torch's, which knows from its own build that there is none. This file is loaded first.
namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::kCUDA;
}
}  // namespace at::accelerator

namespace emulator {

Memory memory;
StreamOrder order;

namespace {

constexpr std::size_t kAlignment = 512;
thread_local c10::StreamId current[kDevices] = {};
bool may_wait = true;
std::mutex sleeping_mutex;
std::set<Line> sleeping;  // streams that seem to be busy until the host waits for one
std::atomic<std::size_t> held = 0, peak = 0;  // bytes on all devices, without those of captures

// The functions of the memory pool that this thread uses, if it uses one. Here, each tensor is a segment.
struct Pool {
  void* (*malloc)(std::size_t, int, cudaStream_t) = nullptr;
  void (*free)(void*, std::size_t, int, cudaStream_t) = nullptr;
};
thread_local Pool pool;

std::vector<pybind11::function>& observers() {  // of exhausted memory
  static auto* const made = new std::vector<pybind11::function>;
  return *made;
}

struct Segment {
  void* data;
  std::size_t bytes;
  c10::Stream stream;
  Pool pool;
};

void free_segment(void* of) {
  const std::unique_ptr<Segment> segment(static_cast<Segment*>(of));
  order.freed(segment->data);
  segment->pool.free(segment->data, segment->bytes, segment->stream.device_index(),
                     native(segment->stream));
}

c10::DataPtr allocate_in_pool(std::size_t bytes, const c10::Stream& stream) {
  void* const data = pool.malloc(bytes, stream.device_index(), native(stream));
  if (data == nullptr) {
    const pybind11::gil_scoped_acquire gil;
    for (const auto& observer : observers()) observer(stream.device_index(), bytes, 0, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory.");
  }
  std::memset(data, 0xcd, bytes);
  order.allocated(data, bytes, line_of(stream));
  auto* const segment = new Segment{data, bytes, stream, pool};
  return {data, segment, &free_segment, stream.device()};
}

void free_memory(void* data) {
  held -= malloc_usable_size(data);
  order.freed(data);
  std::free(data);
}

}  // namespace

// Fresh memory holds garbage, so that nothing relies on zeros. What a capture allocates belongs to its graph, and is
// never freed here.
c10::DataPtr Memory::allocate(std::size_t bytes) {
  const c10::Stream stream = current_stream();
  if (bytes == 0) return {nullptr, stream.device()};
  if (pool.malloc != nullptr) return allocate_in_pool(bytes, stream);
  void* const data =
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  std::memset(data, 0xcd, bytes);
  order.allocated(data, bytes, line_of(stream));
  if (is_captured(stream)) return {data, stream.device()};
  held += malloc_usable_size(data);
  peak = std::max(peak.load(), held.load());
  return {data, data, &free_memory, stream.device()};
}

void Memory::copy_data(void* to, const void* from, std::size_t bytes) const {
  std::memcpy(to, from, bytes);
}

c10::Stream current_stream(c10::Device device) {
  const auto index =
      static_cast<c10::DeviceIndex>(device.has_index() ? device.index() : device::current_device());
  TORCH_CHECK(index < kDevices, "there is no device cuda:", static_cast<int>(index));
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index), current[index]);
}

cudaStream_t native(const c10::Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.id());
}

Line line_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

bool is_captured(const c10::Stream& stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  cudaStreamGetCaptureInfo(native(stream), &status, &id);
  return status == cudaStreamCaptureStatusActive;
}

void wait() {
  TORCH_CHECK(may_wait, "called a synchronizing CUDA operation");
  const std::lock_guard lock(sleeping_mutex);
  sleeping.clear();
}

namespace {

cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device::current_device())};
  }
  void setDevice(c10::Device to) const override { uncheckedSetDevice(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) device::set_device(to.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device with_index(c10::Device device) const {
    return device.has_index() ? device : getDevice();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    cudaStream_t made = nullptr;
    cudaStreamCreate(&made);
    return c10::Stream(c10::Stream::UNSAFE, with_index(device),
                       reinterpret_cast<c10::StreamId>(made));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    current[to.device_index()] = to.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), 0);
    cudaEventRecord(event_of(*event), native(stream));
    order.record(*event, line_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    cudaStreamWaitEvent(native(stream), event_of(event), 0);
    order.wait(line_of(stream), event);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) order.host_waits(event);
    return event == nullptr || cudaEventQuery(event_of(event)) == cudaSuccess;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr) return;
    order.forget(event);
    cudaEventDestroy(event_of(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(sleeping_mutex);
    if (sleeping.contains(line_of(stream))) return false;
    order.host_waits(line_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait();
    order.host_waits(line_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    wait();
    queryEvent(event);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait();
    order.host_waits_for_all(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    order.recorded(data.get(), line_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(device::current_device());
  }
  void setCurrentDevice(c10::DeviceIndex to) const override { device::set_device(to); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// For DistributedDataParallel.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<std::int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional(*to - *from) : std::nullopt;
  }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Timer);

}  // namespace
}  // namespace emulator

PYBIND11_MODULE(_emulator, m) {
  using namespace emulator;
  c10::SetAllocator(c10::kCUDA, &memory);
  m.attr("devices") = static_cast<int>(kDevices);
  m.def("current_device", &device::current_device);
  m.def("set_device", &device::set_device);
  m.def("make_multicast", &device::make_multicast);
  m.def("kernel_uses_addresses",
        [](const std::vector<std::int64_t>& read, const std::vector<std::int64_t>& written) {
          const c10::Stream stream = current_stream();
          if (is_captured(stream)) return;
          order.begin(line_of(stream));
          for (const auto address : read)
            order.access_at(address, line_of(stream), false, "a kernel");
          for (const auto address : written)
            order.access_at(address, line_of(stream), true, "a kernel");
        });
  m.def("exchange_pool", [](std::uintptr_t malloc, std::uintptr_t free) {
    const Pool before = std::exchange(pool, {reinterpret_cast<decltype(Pool::malloc)>(malloc),
                                             reinterpret_cast<decltype(Pool::free)>(free)});
    return std::pair(reinterpret_cast<std::uintptr_t>(before.malloc),
                     reinterpret_cast<std::uintptr_t>(before.free));
  });
  m.def("when_out_of_memory",
        [](const pybind11::function& observer) { observers().push_back(observer); });
  m.def("sleep", [] {
    const std::lock_guard lock(sleeping_mutex);
    sleeping.insert(line_of(current_stream()));
  });
  m.def("let_wait", [](bool may) { may_wait = may; });
  m.def("memory", [] { return std::pair(held.load(), peak.load()); });
  m.def("reset_peak", [] { peak = held.load(); });
  m.def("is_captured", [] { return is_captured(current_stream()); });
  m.def("begin_capture", [] {
    return cudaStreamBeginCapture(native(current_stream()), cudaStreamCaptureModeRelaxed);
  });
  m.def("end_capture", [] {
    cudaGraph_t graph = nullptr;
    TORCH_CHECK(cudaStreamEndCapture(native(current_stream()), &graph) == cudaSuccess,
                "a stream has not been joined");
    return reinterpret_cast<std::uintptr_t>(graph);
  });
  m.def("launch_graph", [](std::uintptr_t graph) {
    const pybind11::gil_scoped_release no_gil;
    cudaGraphLaunch(reinterpret_cast<cudaGraph_t>(graph), native(current_stream()));
  });
  m.def("destroy_graph",
        [](std::uintptr_t graph) { cudaGraphDestroy(reinterpret_cast<cudaGraph_t>(graph)); });
}

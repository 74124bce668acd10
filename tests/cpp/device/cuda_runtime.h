// CUDA's language and runtime on a CPU, as far as csrc/cuda/ needs them, so that tests run the
// actual kernels. A block is a system thread. Its threads are fibers, which switch at barriers,
// shuffles and atomic loads, in an order that is random every time, so that tests soon find a
// missing barrier; `make racecheck` finds it in any order (order.h). Streams execute their work immediately (streams.cpp), except while they are
// captured: then it becomes a node of a graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// These headers use an attribute with the name of a macro below.
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "order.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

struct Stream;
struct Graph;
struct Event;

namespace device {

extern thread_local dim3 thread_index, block_index, block_size, grid_size;

void pause();
// A barrier of the block. Returns true if any thread votes.
bool meet(bool vote);
// Returns the values of all threads of the warp. It orders memory accesses only if it is a barrier.
const std::uint64_t* exchange(std::uint64_t value, bool barrier = false);

// Runs work, or adds it to the graph of the stream's capture.
void enqueue(Stream* stream, std::function<void()> work);
// Every thread calls `run_thread`, which calls the kernel.
int launch(const void* kernel, std::function<void()> run_thread, dim3 grid, dim3 threads,
           Stream* stream);
// How many kernels, copies and fills the host has enqueued.
int enqueued();
// How often the host has asked whether a stream is captured, and how often it has recorded an event.
int capture_queries();
int recorded_events();
// How many kernels were launched that had not been loaded.
int unloaded_launches();
// True if the nodes of a graph can run in one order only.
bool in_one_order(const Graph& graph);

template <class To, class From>
To converted(From from) {
  To to{};
  std::memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}

}  // namespace device

#define __device__
#define __host__
#define __global__
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#define threadIdx device::thread_index
#define blockIdx device::block_index
#define blockDim device::block_size
#define gridDim device::grid_size

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline void __syncthreads() { device::meet(false); }
inline int __syncthreads_or(int vote) { return device::meet(vote != 0) ? 1 : 0; }
inline void __syncwarp() { device::exchange(0, true); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const auto all = device::exchange(device::converted<std::uint64_t>(value));
  return device::converted<T>(all[threadIdx.x % 32 ^ static_cast<unsigned>(mask)]);
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  const auto all = device::exchange(device::converted<std::uint64_t>(value));
  return device::converted<T>(all[lane % 32]);
}

template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const auto all = device::exchange(device::converted<std::uint64_t>(value));
  const int from = static_cast<int>(threadIdx.x % 32) - distance;
  return from < 0 ? value : device::converted<T>(all[from]);
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const auto all = device::exchange(vote ? 1 : 0);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(all[i]) << i;
  return votes;
}
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto all = device::exchange(value);
  std::uint64_t most = 0;
  for (int i = 0; i < 32; ++i) most = all[i] > most ? all[i] : most;
  return static_cast<unsigned>(most);
}

inline void __threadfence() { device::fence(device::Scope::device); }
inline void __threadfence_system() { device::fence(device::Scope::system); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }

namespace device {
// Stores change(value). Returns the value before.
template <class Change>
unsigned update(unsigned* word, Change change) {
  for (unsigned before = 0;;) {
    const unsigned found = compare_exchange(word, before, change(before));
    if (found == before) return found;
    before = found;
  }
}
}  // namespace device
inline unsigned atomicAdd(unsigned* word, unsigned value) {
  return device::update(word, [value](unsigned before) { return before + value; });
}
inline unsigned atomicExch(unsigned* word, unsigned value) {
  return device::update(word, [value](unsigned) { return value; });
}
inline unsigned atomicMax(unsigned* word, unsigned value) {
  return device::update(word, [value](unsigned before) { return before > value ? before : value; });
}
inline unsigned atomicOr(unsigned* word, unsigned value) {
  return device::update(word, [value](unsigned before) { return before | value; });
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

using cudaError_t = int;
using cudaStream_t = Stream*;
using cudaEvent_t = Event*;
using cudaGraph_t = Graph*;
inline constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidResourceHandle = 400,
                             cudaErrorNotReady = 600, cudaErrorPeerAccessAlreadyEnabled = 704;
inline constexpr cudaError_t cudaErrorStreamCaptureUnjoined = 904,
                             cudaErrorStreamCaptureIsolation = 905, cudaErrorCapturedEvent = 907;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum cudaMemoryType { cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum {
  cudaStreamNonBlocking = 1,
  cudaEventDisableTiming = 1,
  cudaHostAllocPortable = 1,
  cudaHostAllocMapped = 2
};
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
struct cudaPointerAttributes {
  int type, device;
};

// Fresh memory holds garbage, so that no code relies on zeros.
inline cudaError_t cudaMalloc(void** to, std::size_t bytes) {
  *to = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*to, 0xcd, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** to, std::size_t bytes, int) {
  return cudaMalloc(to, bytes);
}
inline cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
inline cudaError_t cudaHostGetDevicePointer(void** to, void* data, int) {
  *to = data;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, int) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  device::enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
template <class L>
cudaError_t cudaLaunchKernel(void (*kernel)(L), dim3 grid, dim3 block, void** arguments,
                             std::size_t, cudaStream_t stream) {
  const auto run = [kernel, launch = *static_cast<const L*>(arguments[0])] { kernel(launch); };
  return device::launch(reinterpret_cast<const void*>(kernel), run, grid, block, stream);
}
template <class L>
cudaError_t cudaLaunchCooperativeKernel(void (*kernel)(L), dim3 grid, dim3 block, void** arguments,
                                        std::size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, bytes, stream);
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void*) {
  *to = {cudaMemoryTypeDevice, 0};
  return cudaSuccess;
}
// Few, so that each block has several pieces of work in tests.
enum { cudaDevAttrMultiProcessorCount = 16 };
inline cudaError_t cudaDeviceGetAttribute(int* to, int, int) {
  *to = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* to) {
  *to = device::current_device();
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  device::set_device(device);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int, int) { return cudaSuccess; }
inline cudaError_t cudaHostRegister(void*, std::size_t, int) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

struct cudaFuncAttributes {};
// Loads a kernel.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel);

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int,
                            cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, int);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
// Runs a graph's nodes one by one, in a random order that its edges allow.
cudaError_t cudaGraphLaunch(cudaGraph_t graph, cudaStream_t);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);

// What a GPU's parts cost, of which kernels are made: fences, reads and stores of host memory, launches in
// graphs, messages between blocks; and whether refined roots and quotients are the IEEE ones. It prints a
// line for each. benchmarks/gpu.sh compiles and runs it; `make cuda-check` only compiles it.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "core/optim/moderate.h"

namespace {

constexpr int kRounds = 1000;
constexpr int kNodes = 200;  // of a graph

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::printf("FAILED in line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check((call), __LINE__)

void tell(const std::string& what, double value, const char* unit) {
  std::printf("%-56s %10.1f %s\n", what.c_str(), value, unit);
  std::fflush(stdout);  // what has been measured stays if the program is stopped
}

// Memory that the host and the device see.
template <class T>
T* pinned(int count) {
  T* data = nullptr;
  CHECK(cudaHostAlloc(&data, sizeof(T) * static_cast<std::size_t>(count), cudaHostAllocMapped));
  for (int i = 0; i < count; ++i) data[i] = T{};
  return data;
}

__device__ void store_to_host(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

enum class Fence { none, gpu, sys };

// Clock cycles that a thread takes for all rounds.
template <Fence kFence, int kStores>
__global__ void fences(std::uint32_t* host, std::uint64_t* taken) {
  const auto begin = static_cast<std::uint64_t>(clock64());
  for (std::uint32_t i = 0; i < kRounds; ++i) {
    for (int k = 0; k < kStores; ++k) store_to_host(host + k, i);
    if constexpr (kFence == Fence::gpu) __threadfence();
    if constexpr (kFence == Fence::sys) __threadfence_system();
  }
  *taken = static_cast<std::uint64_t>(clock64()) - begin;
}

__global__ void read_host(const std::uint32_t* host, std::uint64_t* taken) {
  const auto begin = static_cast<std::uint64_t>(clock64());
  for (int i = 0; i < kRounds; ++i) {
    std::uint32_t value;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(host) : "memory");
    if (value != 0) break;
  }
  *taken = static_cast<std::uint64_t>(clock64()) - begin;
}

template <int kStores>
__global__ void store_and_end(std::uint32_t* host) {
  for (int k = 0; k < kStores; ++k) store_to_host(host + k, 1);
}

template <int kBytes>
struct Parameters {
  std::byte bytes[kBytes];
};

template <int kBytes>
__global__ void nothing(const __grid_constant__ Parameters<kBytes>) {}

// 16 bytes at once, of which each half is the number of the round.
__device__ void send(std::uint64_t* to, std::uint64_t number) {
  asm volatile(
      "{ .reg .b128 v; mov.b128 v, {%1, %1}; st.relaxed.sys.global.b128 [%0], v; }" ::"l"(to),
      "l"(number)
      : "memory");
}

// Returns true if the halves were of different rounds.
__device__ bool receive(const std::uint64_t* from, std::uint64_t number) {
  std::uint64_t first, second;
  bool torn = false;
  do {
    asm volatile("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }"
                 : "=l"(first), "=l"(second)
                 : "l"(from)
                 : "memory");
    torn = torn || first != second;
  } while (first != number || second != number);
  return torn;
}

// Two blocks, which a cooperative launch makes resident together.
__global__ void ping_pong(std::uint64_t* boxes, std::uint64_t* taken, std::uint32_t* torn) {
  std::uint64_t *const mine = boxes + 16 * blockIdx.x, *const peers = boxes + 16 * (1 - blockIdx.x);
  const auto begin = static_cast<std::uint64_t>(clock64());
  for (std::uint64_t i = 1; i <= kRounds; ++i) {
    if (blockIdx.x == 0) send(peers, i);
    if (receive(mine, i)) atomicAdd(torn, 1u);
    if (blockIdx.x == 1) send(peers, i);
  }
  if (blockIdx.x == 0) *taken = static_cast<std::uint64_t>(clock64()) - begin;
}

// Counts the inputs for which a root, or 1 / x, is not the IEEE one, among those that are moderate.
__global__ void compare(unsigned long long* wrong_roots, unsigned long long* wrong_quotients) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  unsigned long long roots = 0, quotients = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i >> 32 == 0;
       i += stride) {
    const float x = __uint_as_float(static_cast<std::uint32_t>(i)), size = fabsf(x);
    if (x >= pycomm::kLeastRooted && x < INFINITY) {
      roots += pycomm::moderate_root(x) != __fsqrt_rn(x);
    }
    if (size >= pycomm::kLeastDivisor && size <= pycomm::kMostDivisor) {
      quotients += pycomm::moderate_quotient(1.0f, x) != __fdiv_rn(1.0f, x);
    }
  }
  if (roots != 0) atomicAdd(wrong_roots, roots);
  if (quotients != 0) atomicAdd(wrong_quotients, quotients);
}

// Runs twice, and tells the second time, per round.
template <class Run>
void tell_clocks(const std::string& what, std::uint64_t* taken, const Run& run) {
  for (int i = 0; i < 2; ++i) {
    run();
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }
  tell(what, static_cast<double>(*taken) / kRounds, "cycles");
}

// The time of a node in a graph of equal kernels, one after the other.
template <class Parameter>
void tell_nodes(const std::string& what, void (*kernel)(Parameter), Parameter parameter,
                bool cooperative) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  void* arguments[] = {&parameter};
  const auto* const code = reinterpret_cast<const void*>(kernel);
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < kNodes; ++i) {
    CHECK(cooperative ? cudaLaunchCooperativeKernel(code, dim3(32), dim3(32), arguments, 0, stream)
                      : cudaLaunchKernel(code, dim3(32), dim3(32), arguments, 0, stream));
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&made, graph, 0));
  float milliseconds = 0;
  for (int i = 0; i < 5; ++i) {  // the last one counts
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(made, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  }
  tell(what, 1e6 * milliseconds / kNodes, "ns");
  CHECK(cudaGraphExecDestroy(made));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  CHECK(cudaStreamDestroy(stream));
}

template <int kBytes>
void tell_gaps() {
  const std::string size = std::to_string(kBytes) + " B of parameters";
  tell_nodes("a node of a graph, plain, " + size, &nothing<kBytes>, Parameters<kBytes>{}, false);
  tell_nodes("a node of a graph, cooperative, " + size, &nothing<kBytes>, Parameters<kBytes>{},
             true);
}

template <int kStores>
void tell_fences(std::uint32_t* host, std::uint64_t* taken) {
  const std::string beside = ", " + std::to_string(kStores) + " stores to the host";
  tell_clocks("no fence" + beside, taken,
              [&] { fences<Fence::none, kStores><<<1, 1>>>(host, taken); });
  tell_clocks("fence.sc.gpu" + beside, taken,
              [&] { fences<Fence::gpu, kStores><<<1, 1>>>(host, taken); });
  tell_clocks("fence.sc.sys" + beside, taken,
              [&] { fences<Fence::sys, kStores><<<1, 1>>>(host, taken); });
}

void tell_messages(std::uint64_t* taken) {
  std::uint64_t* boxes = nullptr;
  CHECK(cudaMalloc(&boxes, 32 * sizeof(std::uint64_t)));
  auto* torn = pinned<std::uint32_t>(1);
  void* arguments[] = {&boxes, &taken, &torn};
  tell_clocks("there and back of 16 bytes between two blocks", taken, [&] {
    CHECK(cudaMemset(boxes, 0, 32 * sizeof(std::uint64_t)));
    CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(&ping_pong), dim3(2), dim3(1),
                                      arguments, 0, nullptr));
  });
  tell("messages of 16 bytes that were torn", *torn, "of them");
}

void tell_roots() {
  auto* const wrong = pinned<unsigned long long>(2);
  compare<<<1024, 256>>>(wrong, wrong + 1);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  tell("roots that are not the IEEE ones, of 2^32 inputs", static_cast<double>(wrong[0]), "inputs");
  tell("1 / x that are not the IEEE ones, of 2^32 inputs", static_cast<double>(wrong[1]), "inputs");
}

}  // namespace

int main() {
  auto* const host = pinned<std::uint32_t>(8);
  auto* const taken = pinned<std::uint64_t>(1);
  tell_fences<0>(host, taken);
  tell_fences<1>(host, taken);
  *host = 0;
  tell_clocks("a read of the host's memory", taken, [&] { read_host<<<1, 1>>>(host, taken); });
  tell_nodes("a kernel that ends without a store to the host", &store_and_end<0>, host, false);
  tell_nodes("a kernel that ends after 1 store to the host", &store_and_end<1>, host, false);
  tell_nodes("a kernel that ends after 6 stores to the host", &store_and_end<6>, host, false);
  tell_gaps<160>();
  tell_gaps<3600>();
  tell_messages(taken);
  tell_roots();
}

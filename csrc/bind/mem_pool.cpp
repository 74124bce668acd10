// C functions for torch.cuda.memory.CUDAPluggableAllocator: memory of CUDA windows' heaps.
//
// torch calls them while it holds the lock of its caching allocator. So they neither take the
// interpreter's lock, which another thread may hold while it waits for torch's, nor wait for other
// ranks. A function has no argument that tells which heap is meant, so each open pool has one of
// its own.
#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bind/python.h"
#include "core/errors.h"
#include "cpu/memory/device_heap.h"
#include "cuda/endpoint.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

constexpr int kPools = 8;

struct Pool {
  std::shared_ptr<cpu::DeviceHeap> heap;
  std::weak_ptr<cuda::Endpoint> endpoint;
};

struct Pools {
  std::mutex mutex;
  std::array<Pool, kPools> all;
};

// Never destroyed: torch frees memory at exit, too.
Pools& pools() {
  static Pools* const made = new Pools;
  return *made;
}

// Why this thread's last allocation has failed; empty if it has not, or if the reason has been told.
thread_local std::string refusal;

// False while the stream is captured, because a capture allows no wait.
bool may_wait(const Pool& pool, std::uintptr_t stream) {
  const auto endpoint = pool.endpoint.lock();
  return endpoint != nullptr && !endpoint->capture_of(stream);
}

void* allocate(int number, std::size_t bytes, void* stream) noexcept {
  try {
    refusal.clear();
    Pool pool;
    {
      const std::lock_guard lock(pools().mutex);
      pool = pools().all[static_cast<std::size_t>(number)];
    }
    const auto count = static_cast<std::int64_t>(bytes);
    std::uintptr_t made = pool.heap->take(count, false);
    if (made == 0 && may_wait(pool, reinterpret_cast<std::uintptr_t>(stream))) {
      made = pool.heap->take(count, true);
    }
    if (made == 0) refusal = pool.heap->refusal(count);
    return reinterpret_cast<void*>(made);
  } catch (const std::exception& error) {
    refusal = error.what();
    return nullptr;
  }
}

void release(void* data) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::lock_guard lock(pools().mutex);
  for (const Pool& pool : pools().all) {
    if (pool.heap != nullptr && pool.heap->contains(address)) return pool.heap->release(address);
  }
}

// Returns the number of the heap's functions.
int open_mem_pool(std::shared_ptr<cpu::DeviceHeap> heap,
                  const std::shared_ptr<cuda::Endpoint>& endpoint) {
  const std::lock_guard lock(pools().mutex);
  for (std::size_t i = 0; i < kPools; ++i) {
    Pool& pool = pools().all[i];
    if (pool.heap == nullptr || pool.heap->over()) {
      pool = {std::move(heap), endpoint};
      return static_cast<int>(i);
    }
  }
  throw std::invalid_argument("at most " + std::to_string(kPools) +
                              " groups of a process can have memory pools, or tensors in them");
}

}  // namespace

void bind_mem_pool(py::module_& m) {
  m.def("open_mem_pool", &open_mem_pool, py::arg("heap"), py::arg("endpoint"));
  m.def("mem_pool_refusal", [] { return std::exchange(refusal, {}); });
}

}  // namespace pycomm::bind

extern "C" {

#define PYCOMM_MEM_POOL(number)                                                 \
  __attribute__((visibility("default"))) void* pycomm_mem_pool_malloc_##number( \
      std::size_t bytes, int, void* stream) {                                   \
    return pycomm::bind::allocate(number, bytes, stream);                       \
  }
PYCOMM_MEM_POOL(0)
PYCOMM_MEM_POOL(1)
PYCOMM_MEM_POOL(2)
PYCOMM_MEM_POOL(3)
PYCOMM_MEM_POOL(4)
PYCOMM_MEM_POOL(5)
PYCOMM_MEM_POOL(6)
PYCOMM_MEM_POOL(7)
#undef PYCOMM_MEM_POOL

__attribute__((visibility("default"))) void pycomm_mem_pool_free(void* data, std::size_t, int,
                                                                 void*) {
  pycomm::bind::release(data);
}

}  // extern "C"

// Stands in for csrc/cuda/multimem.cuh. Nothing can be read at a multicast address: it lies in a reserved
// area, which begins with a table of the windows that it stands for.
#pragma once

#include <sys/mman.h>

#include <stdexcept>

#include "core/layout.h"
#include "core/reduce.h"
#include "cuda_runtime.h"

namespace device {

struct WindowTable {
  static constexpr std::int64_t kAreaBytes = std::int64_t{1} << 32, kBytes = 4096;
  int count;
  std::byte* windows[64];

  static WindowTable& of(std::intptr_t address) {
    return *reinterpret_cast<WindowTable*>(address / kAreaBytes * kAreaBytes);
  }
};

// The multicast address of windows, by rank.
inline std::uintptr_t make_multicast(const std::vector<std::uintptr_t>& windows) {
  void* const reserved = mmap(nullptr, 2 * WindowTable::kAreaBytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const std::int64_t begin =
      pycomm::round_up(reinterpret_cast<std::intptr_t>(reserved), WindowTable::kAreaBytes);
  auto* const table = reinterpret_cast<WindowTable*>(begin);
  if (reserved == MAP_FAILED || mprotect(table, WindowTable::kBytes, PROT_READ | PROT_WRITE) != 0) {
    throw std::runtime_error("no addresses for multicast");
  }
  for (const std::uintptr_t window : windows) {
    table->windows[table->count++] = reinterpret_cast<std::byte*>(window);
  }
  return static_cast<std::uintptr_t>(begin + WindowTable::kBytes);
}

// Calls visit with the place in each window, the last rank's first: a switch does not add in rank order.
template <class Visit>
void visit_windows(const uint4* address, Visit visit) {
  const auto place = reinterpret_cast<std::intptr_t>(address);
  const WindowTable& table = WindowTable::of(place);
  const std::int64_t offset = place % WindowTable::kAreaBytes - WindowTable::kBytes;
  for (int r = table.count - 1; r >= 0; --r)
    visit(reinterpret_cast<uint4*>(table.windows[r] + offset));
}

}  // namespace device

namespace pycomm::cuda {

inline void fence_aliases() {}  // no address has an alias here that a cache could keep apart

template <class T>
uint4 multimem_sum(const uint4* address) {
  struct alignas(uint4) Pack {
    T element[sizeof(uint4) / sizeof(T)];
  };
  float sum[sizeof(uint4) / sizeof(T)];
  for (float& each : sum) each = -0.0f;
  device::visit_windows(address, [&](const uint4* window) {
    const Pack pack = bit_cast<Pack>(*window);
    float* each = sum;
    for (const T& element : pack.element) *each++ += load(element);
  });
  Pack result;
  const float* each = sum;
  for (T& element : result.element) element = store<T>(*each++);
  return bit_cast<uint4>(result);
}

inline void multimem_store(uint4* address, uint4 words) {
  device::visit_windows(address, [words](uint4* window) { *window = words; });
}

}  // namespace pycomm::cuda

// Four neighbours, which a thread moves in one access. If the lanes of a warp take neighbouring ones,
// each access of the warp is contiguous, whatever the type.
#pragma once

#include <cstdint>

#include "cuda/layout.h"

namespace pycomm::cuda {

inline constexpr int kQuad = 4;

template <class T>
struct alignas(sizeof(T) * kQuad) Quad {
  T element[kQuad];
};

__device__ inline int lane() { return static_cast<int>(threadIdx.x % 32); }

template <class T>
__device__ bool is_aligned_as(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % alignof(T) == 0;
}

}  // namespace pycomm::cuda

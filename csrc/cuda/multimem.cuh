// Instructions on a multicast address, which stands for one place in the windows of all ranks: PTX ISA,
// "multimem". Devices before sm_90 have none, and no such addresses.
#pragma once

#include <cuda_runtime_api.h>

#include "core/types.h"

namespace pycomm::cuda {

// Accesses through a multicast address and through a window's own address are aliases of each other.
// Release and acquire order them only if such a fence is between (PTX ISA, "Causality order",
// proxy-preserved).
__device__ inline void fence_aliases() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.alias;" ::: "memory");
#endif
}

// The sum of what all windows hold, in 16 bytes of elements. Sums of 16-bit floats accumulate in fp32,
// and are rounded.
template <class T>
__device__ uint4 multimem_sum(const uint4* address) {
  uint4 sum{};
#if __CUDA_ARCH__ >= 900
#define PYCOMM_MULTIMEM_SUM(type)                                                          \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add" type " {%0, %1, %2, %3}, [%4];" \
               : "=r"(sum.x), "=r"(sum.y), "=r"(sum.z), "=r"(sum.w)                        \
               : "l"(__cvta_generic_to_global(address))                                    \
               : "memory")
  if constexpr (std::is_same_v<T, Half>) {
    PYCOMM_MULTIMEM_SUM(".acc::f32.v4.f16x2");
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    PYCOMM_MULTIMEM_SUM(".acc::f32.v4.bf16x2");
  } else {
    static_assert(std::is_same_v<T, float>);
    PYCOMM_MULTIMEM_SUM(".v4.f32");
  }
#undef PYCOMM_MULTIMEM_SUM
#endif
  return sum;
}

// Stores 16 bytes in all windows.
__device__ inline void multimem_store(uint4* address, uint4 words) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
               : "memory");
#endif
}

}  // namespace pycomm::cuda

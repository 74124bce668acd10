// The launchers, one file each; every one instantiates the core/ header of its name.
#pragma once

#include <cuda_runtime_api.h>

namespace pycomm::cuda {

struct Launch;
struct CodedLaunch;

void launch_one_shot(const Launch& launch, cudaStream_t stream);
void launch_two_shot(const Launch& launch, cudaStream_t stream);
void launch_reduce_scatter(const Launch& launch, cudaStream_t stream);
void launch_all_gather(const Launch& launch, cudaStream_t stream);
void launch_ring(const Launch& launch, cudaStream_t stream);
void launch_tree(const Launch& launch, cudaStream_t stream);
void launch_broadcast(const Launch& launch, cudaStream_t stream);
void launch_barrier(const Launch& launch, cudaStream_t stream);

// Of int8 and casts.
void launch_coded_two_shot(const CodedLaunch& launch, cudaStream_t stream);
void launch_coded_ring(const CodedLaunch& launch, cudaStream_t stream);
void launch_coded_tree(const CodedLaunch& launch, cudaStream_t stream);
void launch_topk_exchange(const CodedLaunch& launch, cudaStream_t stream);
// Before int8 and casts, with feedback: finds CodedLaunch::outlooks.
void launch_outlook(const CodedLaunch& launch, cudaStream_t stream);

}  // namespace pycomm::cuda

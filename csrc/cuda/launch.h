// The launchers. A body of core/algorithms/run.h is compiled in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "core/codecs/table.h"

namespace pycomm::cuda {

struct Launch;
struct CodedLaunch;

template <class Body>
void launch_plain(const Launch& launch, cudaStream_t stream);
// With a codec of blocks.
template <class Body, class Codecs = BlockCodecs>
void launch_coded(const CodedLaunch& launch, cudaStream_t stream);
void launch_topk_exchange(const CodedLaunch& launch, cudaStream_t stream);
// Before int8 and casts, with feedback: finds CodedLaunch::outlooks.
void launch_preflight(const CodedLaunch& launch, cudaStream_t stream);

}  // namespace pycomm::cuda

// The kernels of compressed collectives that are searched for races, with one type of elements, and those
// of top-k.
#include "cuda/algorithms/topk_exchange.cu"
#include "cuda/codecs/bucket.cu"
#include "cuda/codecs/topk_lists.cu"
#include "cuda/codecs/topk_select.cu"

namespace pycomm::cuda {

#define PYCOMM_LAUNCH(Body)                                                  \
  template <>                                                                \
  void launch_coded<Body>(const CodedLaunch& launch, cudaStream_t stream) {  \
    launch_meeting<&coded_kernel<Body, float, BlockCodecs>>(launch, stream); \
  }
PYCOMM_LAUNCH(TwoShot)
PYCOMM_LAUNCH(Ring)
PYCOMM_LAUNCH(Tree)

}  // namespace pycomm::cuda

// The kernels of uncompressed collectives that are searched for races: each with one type of elements,
// because the others differ in nothing that orders accesses.
#include "cuda/multicast.cuh"

namespace pycomm::cuda {
namespace {

// Few warps to a block: ThreadSanitizer's work at a barrier grows with the square of the threads. In
// packets, there is one for 32 items (cuda/packets.cuh).
constexpr int kFewThreads = 64, kThreadsForPackets = 96;

template <class Body>
void launch_one(const Launch& launch, cudaStream_t stream) {
  if constexpr (requires { Body::kMovesOnly; }) {
    launch_meeting<&kernel<Body, std::byte>>(launch, stream, kFewThreads);
  } else {
    if constexpr (std::is_same_v<Body, OneShot>) {
      constexpr auto* kPackets = &packets_kernel<float, Known<ReduceOp::sum>>;
      const bool packets = fits_packets(launch.ranks[0].operation);
      if (packets) return launch_meeting<kPackets>(launch, stream, kThreadsForPackets);
    }
    launch_meeting<&kernel<Body, float>>(launch, stream, kFewThreads);
  }
}

}  // namespace

#define PYCOMM_LAUNCH(Body)                                            \
  template <>                                                          \
  void launch_plain<Body>(const Launch& launch, cudaStream_t stream) { \
    launch_one<Body>(launch, stream);                                  \
  }
PYCOMM_LAUNCH(OneShot)
PYCOMM_LAUNCH(TwoShot)
PYCOMM_LAUNCH(Ring)
PYCOMM_LAUNCH(Tree)
PYCOMM_LAUNCH(Multicast)
PYCOMM_LAUNCH(ReduceScatter)
PYCOMM_LAUNCH(AllGather)
PYCOMM_LAUNCH(Broadcast)
PYCOMM_LAUNCH(Barrier)
PYCOMM_LAUNCH(Reduce)
PYCOMM_LAUNCH(Gather)
PYCOMM_LAUNCH(Scatter)
PYCOMM_LAUNCH(AllToAll)

}  // namespace pycomm::cuda

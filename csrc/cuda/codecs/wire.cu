#include "cuda/codecs/wire.h"

#include <algorithm>
#include <cstring>

#include "cuda/codecs/coded_launch.cuh"

namespace pycomm::cuda {
namespace {

// Where the elements of one stride lie, encoded.
template <class Codec>
__device__ Encoded wire_at(const WireJob& job, std::int64_t start, int shift) {
  std::byte* const body = job.wire + sizeof(WireHeader);
  if constexpr (Codec::kScaled) {
    const WireTiles tiles{job.n, shift};
    return {body + tiles.payload(start), reinterpret_cast<float*>(body + tiles.scale(start))};
  } else {
    return {body + start * static_cast<std::int64_t>(sizeof(typename Codec::Payload)), nullptr};
  }
}

// The header, and what pads the last tile's payload, so that no byte is left undefined.
template <class Codec>
__device__ void write_frame(const WireJob& job, int shift) {
  const WireHeader header = header_of(job.codec, job.n);
  if (threadIdx.x == 0) {
    std::memcpy(__builtin_assume_aligned(job.wire, 4), &header, sizeof(header));
  }
  if (!Codec::kScaled || job.n % 16 == 0) return;
  const std::int64_t last = (job.n - 1) / kBlockElements * kBlockElements;
  std::byte* const end = wire_at<Codec>(job, last, shift).payload + (job.n - last);
  if (threadIdx.x < 16 - job.n % 16) end[threadIdx.x] = std::byte{0};
}

// Like encode_blocks(), for one source without feedback, which takes a third of the registers.
template <class T, class Codec>
__device__ void encode_strides(const WireJob& job) {
  const int shift = block_shift(job.codec);
  if (blockIdx.x == 0) write_frame<Codec>(job, shift);
  const std::int64_t start = threadIdx.x * kOctet;
  for (std::int64_t stride = blockIdx.x * kBlockElements; stride < job.n;
       stride += gridDim.x * kBlockElements) {
    const int n = octet_count(job.n - stride - start);
    const auto octet = load_octet(reinterpret_cast<const T*>(job.elements) + stride + start, n);
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = load(octet.element[i]);
    Octet<typename Codec::Payload> made;
    float scale = 1.0f;
    const auto first = [&] { return job.places[stride]; };
    encode_octet<Codec>(v, job.codec.stochastic != 0, shift, job.random, first, made, scale);
    if (n > 0) {
      store_encoded<Codec>(wire_at<Codec>(job, stride, shift), start, n, shift, made, scale);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 3) encode_kernel(const __grid_constant__ WireJob job) {
  BlockCodecs::visit(job.codec,
                     [&](auto type) { encode_strides<T, typename decltype(type)::type>(job); });
}

// A block takes a run per warp at a time; they lie in one tile.
constexpr std::int64_t kDecodeStride = kThreads / 32 * (kDecodedBlocks << kRunShift);
static_assert(kWireTile % kDecodeStride == 0);

// Not inlined: it has fewer registers than the loop around it.
template <class T, class Codec>
__device__ __noinline__ void decode_add(Encoded from, T* output, std::int64_t n, int shift) {
  decode_blocks<T, Codec, true>(from, output, 0, n, shift);
}

template <class T, class Codec, bool add>
__device__ void decode_strides(const WireJob& job) {
  const int shift = block_shift(job.codec);
  for (std::int64_t start = blockIdx.x * kDecodeStride; start < job.n;
       start += gridDim.x * kDecodeStride) {
    const std::int64_t n = job.n - start < kDecodeStride ? job.n - start : kDecodeStride;
    const Encoded from = wire_at<Codec>(job, start, shift);
    T* const output = reinterpret_cast<T*>(job.elements) + start;
    if constexpr (add) {
      decode_add<T, Codec>(from, output, n, shift);
    } else {
      decode_all<T, Codec, kDecodedBlocks>(from, output, n, shift);
    }
  }
}

template <class T, bool add>
__global__ void __launch_bounds__(kThreads, add ? 4 : 2)
    decode_kernel(const __grid_constant__ WireJob job) {
  BlockCodecs::visit(
      job.codec, [&](auto type) { decode_strides<T, typename decltype(type)::type, add>(job); });
}

// Launches blocks that take `stride` elements at a time.
template <auto kernel>
void launch_wire(const WireJob& job, std::int64_t stride) {
  constexpr std::int64_t kMostBlocks = 1024;
  const std::int64_t blocks = std::clamp<std::int64_t>(ceil_div(job.n, stride), 1, kMostBlocks);
  launch_blocks<kernel>(blocks, job, reinterpret_cast<cudaStream_t>(job.stream));
}

void check_aligned(const WireJob& job) {
  PYCOMM_CHECK(reinterpret_cast<std::uintptr_t>(job.wire) % 4 == 0,
               "wire must be aligned to 4 bytes");
}

// Throws std::invalid_argument unless the header is that of an encoding of n elements by `codec`.
void check_header(const WireJob& job, std::int64_t bytes) {
  const auto stream = reinterpret_cast<cudaStream_t>(job.stream);
  WireHeader header;
  if (bytes >= static_cast<std::int64_t>(sizeof(header))) {
    PYCOMM_CUDA_CHECK(
        cudaMemcpyAsync(&header, job.wire, sizeof(header), cudaMemcpyDeviceToHost, stream));
    PYCOMM_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  pycomm::check_header(job.codec, header, bytes, job.n);
}

}  // namespace

void encode(const WireJob& job) {
  check_aligned(job);
  const DeviceGuard guard(job.device);
  if (job.codec.kind == CodecKind::topk) return encode_topk(job);
  visit_compressible(job.dtype, [&](auto element) {
    launch_wire<&encode_kernel<decltype(element)>>(job, kBlockElements);
  });
}

void decode(const WireJob& job, std::int64_t bytes, bool add, bool checks) {
  check_aligned(job);
  PYCOMM_CHECK(!add || job.dtype == DType::f32, "out must be float32 if add=True");
  const DeviceGuard guard(job.device);
  if (checks) check_header(job, bytes);
  if (job.codec.kind == CodecKind::topk) return decode_topk(job, bytes, add, checks);
  if (add) return launch_wire<&decode_kernel<float, true>>(job, kDecodeStride);
  visit_compressible(job.dtype, [&](auto element) {
    launch_wire<&decode_kernel<decltype(element), false>>(job, kDecodeStride);
  });
}

}  // namespace pycomm::cuda

#include "cuda/codecs/wire.h"

#include <algorithm>

#include "cuda/codecs/coded_launch.cuh"

namespace pycomm::cuda {
namespace {

// Where the elements of one stride lie, encoded.
__device__ Encoded wire_at(const WireJob& job, std::int64_t start) {
  std::byte* const body = job.wire + sizeof(WireHeader);
  if (!is_scaled(job.codec)) {
    return {body + start * size_of(job.codec.values), nullptr};
  }
  const Range tile = Tiles{job.n, kWireTile}[start / kWireTile];
  const std::int64_t block = job.codec.block, within = start - tile.begin;
  std::byte* const at = body + start / kWireTile * scaled_wire_tile_bytes(kWireTile, block);
  return {at + within,
          reinterpret_cast<float*>(at + scaled_wire_tile(tile.count, block).scale_offset(within))};
}

// The header, and what pads the last tile's payload, so that no byte is left undefined.
__device__ void write_frame(const WireJob& job) {
  const WireHeader header = header_of(job.codec, job.n);
  for (std::size_t i = threadIdx.x; i < sizeof(header); i += blockDim.x) {
    job.wire[i] = reinterpret_cast<const std::byte*>(&header)[i];
  }
  if (!is_scaled(job.codec) || job.n % 16 == 0) return;
  const std::int64_t last = (job.n - 1) / kBlockElements * kBlockElements;
  std::byte* const end = wire_at(job, last).payload + (job.n - last);
  if (threadIdx.x < 16 - job.n % 16) end[threadIdx.x] = std::byte{0};
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) encode_kernel(const __grid_constant__ WireJob job) {
  const int shift = CodedStaging::in(0, job.codec).shift;
  if (blockIdx.x == 0) write_frame(job);
  for (std::int64_t start = blockIdx.x * kBlockElements; start < job.n;
       start += gridDim.x * kBlockElements) {
    const Source own{{job.elements + start * sizeof(T), nullptr}, true};
    Pass pass;
    pass.from = &own;
    pass.n_from = 1;
    pass.to = wire_at(job, start);
    pass.n = job.n - start < kBlockElements ? job.n - start : kBlockElements;
    pass.random = job.random;
    pass.first = job.offset + start;
    encode_pass<T>(job.codec, pass, true, shift);
  }
}

template <class T, bool add>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ WireJob job) {
  const int shift = CodedStaging::in(0, job.codec).shift;
  for (std::int64_t start = blockIdx.x * kBlockElements; start < job.n;
       start += gridDim.x * kBlockElements) {
    const std::int64_t n = job.n - start < kBlockElements ? job.n - start : kBlockElements;
    T* const output = reinterpret_cast<T*>(job.elements) + start;
    decode_pass<T, add>(job.codec, wire_at(job, start), output, n, shift);
  }
}

template <auto kernel>
void launch_wire(const WireJob& job) {
  constexpr std::int64_t kMostBlocks = 1024;
  const std::int64_t blocks =
      std::clamp<std::int64_t>(ceil_div(job.n, kBlockElements), 1, kMostBlocks);
  launch_blocks<kernel>(blocks, job, reinterpret_cast<cudaStream_t>(job.stream));
}

void check_aligned(const WireJob& job) {
  PYCOMM_CHECK(reinterpret_cast<std::uintptr_t>(job.wire) % 4 == 0,
               "wire must be aligned to 4 bytes");
}

}  // namespace

void encode(const WireJob& job) {
  check_aligned(job);
  const DeviceGuard guard(job.device);
  if (job.codec.kind == CodecKind::topk) return encode_topk(job);
  visit_compressible(job.dtype,
                     [&](auto element) { launch_wire<&encode_kernel<decltype(element)>>(job); });
}

void decode(const WireJob& job, std::int64_t bytes, bool add) {
  check_aligned(job);
  PYCOMM_CHECK(!add || job.dtype == DType::f32, "out must be float32 to be added to");
  const DeviceGuard guard(job.device);
  const auto stream = reinterpret_cast<cudaStream_t>(job.stream);
  WireHeader header;
  if (bytes >= static_cast<std::int64_t>(sizeof(header))) {
    PYCOMM_CUDA_CHECK(
        cudaMemcpyAsync(&header, job.wire, sizeof(header), cudaMemcpyDeviceToHost, stream));
    PYCOMM_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  check_header(job.codec, header, bytes, job.n);
  if (job.codec.kind == CodecKind::topk) return decode_topk(job, bytes, add);
  if (add) return launch_wire<&decode_kernel<float, true>>(job);
  visit_compressible(
      job.dtype, [&](auto element) { launch_wire<&decode_kernel<decltype(element), false>>(job); });
}

}  // namespace pycomm::cuda

// The passes of loops.cuh for most elements of a large tensor: with a scale for every 256 of them,
// rounded to nearest, without a residual. A warp takes runs of several such blocks, and loads a whole
// run before it needs the first element. The bits are those of loops.cuh.
#pragma once

#include "cuda/codecs/loops.cuh"
#include "cuda/quads.cuh"

namespace pycomm::cuda {

inline constexpr int kRunShift = 8;
// How many quads, and how many elements, of a block each lane has.
inline constexpr int kBlockQuads = (1 << kRunShift) / (32 * kQuad);
inline constexpr int kBlockOfLane = kBlockQuads * kQuad;
// Blocks of a run: in an algorithm, which needs registers of its own, and in a kernel that only decodes.
inline constexpr int kRunBlocks = 2, kDecodedBlocks = 4;

// A lane's elements of a run: quad q begins at element (32 q + lane) * kQuad.
template <class T, int blocks = kRunBlocks>
struct Run {
  static constexpr std::int64_t kElements = blocks << kRunShift;  // of all lanes
  static constexpr int kQuads = blocks * kBlockQuads, kOfLane = kQuads * kQuad;

  Quad<T> quad[kQuads];
  __device__ T& operator[](int i) { return quad[i / kQuad].element[i % kQuad]; }
  __device__ const T& operator[](int i) const { return quad[i / kQuad].element[i % kQuad]; }

  __device__ static Run load(const T* from) {
    Run run;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      run.quad[q] = reinterpret_cast<const Quad<T>*>(from)[q * 32 + lane()];
    }
    return run;
  }
  __device__ void store(T* to) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) reinterpret_cast<Quad<T>*>(to)[q * 32 + lane()] = quad[q];
  }
};

// Calls visit(start) for this warp's runs of `n` elements.
template <int blocks, class Visit>
__device__ void each_run(std::int64_t n, Visit visit) {
  constexpr std::int64_t kRun = blocks << kRunShift;
  for (std::int64_t start = threadIdx.x / 32 * kRun; start < n; start += kThreads / 32 * kRun) {
    visit(start);
  }
}

// An encoded run.
template <class Codec, int blocks = kRunBlocks>
struct CodedRun {
  Run<typename Codec::Payload, blocks> payload;
  float scale[blocks];

  __device__ static CodedRun load(const Encoded& from, std::int64_t start) {
    CodedRun run;
    run.payload = decltype(payload)::load(payload_at<Codec>(from, start));
#pragma unroll
    for (int b = 0; b < blocks; ++b) run.scale[b] = from.scales[(start >> kRunShift) + b];
    return run;
  }
  __device__ float decoded(int i) const {
    return Codec::decode(payload[i], scale[i / kBlockOfLane]);
  }
};

// store() of a value that is not NaN.
template <class T>
__device__ T store_number(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return store<T>(value);
  }
}

// Stores a run, decoded. Returns whether all blocks' largest elements are finite as Ts.
template <class T, class Codec, int blocks>
__device__ bool store_decoded(const CodedRun<Codec, blocks>& run, T* to) {
  bool finite = true, numbers = true;
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    finite &= finite_as<T, Codec>(nullptr, 0, run.scale[b]);
    numbers &= run.scale[b] == run.scale[b];
  }
  Run<T, blocks> decoded;
  if (numbers) {  // then so are all elements, which store() need not test
#pragma unroll
    for (int i = 0; i < decoded.kOfLane; ++i) decoded[i] = store_number<T>(run.decoded(i));
  } else {
#pragma unroll
    for (int i = 0; i < decoded.kOfLane; ++i) decoded[i] = store<T>(run.decoded(i));
  }
  decoded.store(to);
  return finite;
}

// The largest magnitude() of each block, by all lanes.
__device__ inline void find_largest(const Run<float>& v, std::uint32_t (&largest)[kRunBlocks]) {
#pragma unroll
  for (int b = 0; b < kRunBlocks; ++b) {
    float most = v[b * kBlockOfLane];
#pragma unroll
    for (int i = 1; i < kBlockOfLane; ++i) most = larger(most, v[b * kBlockOfLane + i]);
    largest[b] = __reduce_max_sync(0xffffffffu, bit_cast<std::uint32_t>(most));
  }
}

// Encodes a run and stores it. Returns whether all elements are finite.
template <class Codec>
__device__ bool encode_run(const Run<float>& v, const Encoded& to, std::int64_t start,
                           CodedRun<Codec>& made) {
  std::uint32_t largest[kRunBlocks];
  find_largest(v, largest);
  // A scale takes two divisions, so each lane makes that of one block.
  static_assert(kRunBlocks == 2);
  const std::uint32_t mine = lane() % 2 != 0 ? largest[1] : largest[0];
  const BlockScale scale = Codec::scale(mine);
  __syncwarp();  // all lanes have read the scales that may have been there
  if (lane() < kRunBlocks) to.scales[(start >> kRunShift) + lane()] = scale.scale;
  BlockScale of[kRunBlocks];
#pragma unroll
  for (int b = 0; b < kRunBlocks; ++b) {
    of[b] = {__shfl_sync(0xffffffffu, scale.scale, b), __shfl_sync(0xffffffffu, scale.inverse, b)};
    made.scale[b] = of[b].scale;
  }
  auto* const words = reinterpret_cast<std::uint32_t*>(to.payload + start);
#pragma unroll
  for (int q = 0; q < v.kQuads; ++q) {
    const int b = q / kBlockQuads;
    Quad<typename Codec::Payload>& quad = made.payload.quad[q];
#pragma unroll
    for (int e = 0; e < kQuad; ++e) quad.element[e] = Codec::encode(v.quad[q].element[e], of[b]);
    // Processors encode values that are not finite differently.
    const std::uint32_t kept = largest[b] < kInfinityBits ? 0xffffffffu : 0;
    words[q * 32 + lane()] = bit_cast<std::uint32_t>(quad) & kept;
  }
  return mine < kInfinityBits;
}

// The sum of encoded contributions.
template <class Codec>
__device__ Run<float> sum_runs(const Source* sources, int count, std::int64_t start) {
  Run<float> sum;
#pragma unroll 2
  for (int s = 0; s < count; ++s) {
    const auto run = CodedRun<Codec>::load(sources[s].encoded, start);
#pragma unroll
    for (int i = 0; i < sum.kOfLane; ++i) {
      sum[i] = s == 0 ? run.decoded(i) : sum[i] + run.decoded(i);
    }
  }
  return sum;
}

// How many elements of a pass encode_runs() can take: all whole runs, or none.
template <class T>
__device__ std::int64_t in_runs(const Pass& pass, bool own, bool stochastic, int shift) {
  const bool power_of_two = (bit_cast<std::uint32_t>(pass.divisor) & 0x7fffffu) == 0;
  const bool takes = shift == kRunShift && !stochastic && pass.residual == nullptr &&
                     power_of_two && is_aligned_as<Quad<T>>(pass.output) &&
                     (!own || (pass.n_from == 1 && !pass.last &&
                               is_aligned_as<Quad<T>>(pass.from[0].encoded.payload)));
  constexpr std::int64_t kRun = Run<T>::kElements;
  return takes ? pass.n / kRun * kRun : 0;
}

// encode_blocks() for `n` elements in whole runs.
template <class T, class Codec>
__device__ bool encode_runs(const Pass& pass, bool own, std::int64_t n) {
  T* const output = static_cast<T*>(pass.output);
  const float factor = pass.last ? 1.0f / pass.divisor : 1.0f;  // exact
  bool finite = true;
  each_run<kRunBlocks>(n, [&](std::int64_t start) {
    Run<float> v;
    if (own) {
      const auto* const x = reinterpret_cast<const T*>(pass.from[0].encoded.payload);
      const auto run = Run<T>::load(x + start);
#pragma unroll
      for (int i = 0; i < v.kOfLane; ++i) v[i] = load(run[i]);
    } else {
      v = sum_runs<Codec>(pass.from, pass.n_from, start);
#pragma unroll
      for (int i = 0; i < v.kOfLane; ++i) v[i] *= factor;
    }
    CodedRun<Codec> made;
    finite &= encode_run<Codec>(v, pass.to, start, made);
    if (output != nullptr) finite &= store_decoded<T>(made, output + start);
  });
  return !finite;
}

// decode_blocks() for `n` elements in whole runs.
template <class T, class Codec, int blocks>
__device__ bool decode_runs(const Encoded& from, T* output, std::int64_t n) {
  bool finite = true;
  each_run<blocks>(n, [&](std::int64_t start) {
    finite &= store_decoded<T>(CodedRun<Codec, blocks>::load(from, start), output + start);
  });
  return !finite;
}

// A pass over all elements: first whole runs if it `takes_runs`, then what is left. Not inlined, nor is
// decode_all(): an algorithm calls them from many places.
template <class T, class Codec, bool takes_runs>
__device__ __noinline__ bool encode_all(const Pass& pass, bool own, bool stochastic, int shift) {
  std::int64_t done = 0;
  bool nonfinite = false;
  if constexpr (takes_runs && Codec::kScaled) {
    done = in_runs<T>(pass, own, stochastic, shift);
    nonfinite = encode_runs<T, Codec>(pass, own, done);
  }
  return encode_blocks<T, Codec>(pass, done, own, stochastic, shift) || nonfinite;
}

// `blocks`: of a run; 0 if there are none.
template <class T, class Codec, int blocks>
__device__ __noinline__ bool decode_all(Encoded from, T* output, std::int64_t n, int shift) {
  std::int64_t done = 0;
  bool nonfinite = false;
  if constexpr (blocks != 0 && Codec::kScaled) {
    constexpr std::int64_t kRun = Run<T, blocks>::kElements;
    const bool takes = shift == kRunShift && is_aligned_as<Quad<T>>(output);
    done = takes ? n / kRun * kRun : 0;
    nonfinite = decode_runs<T, Codec, blocks>(from, output, done);
  }
  return decode_blocks<T, Codec, false>(from, output, done, n, shift) || nonfinite;
}

// One pass by the whole block. `own`: one of the sources is the caller's contribution. Returns, to
// each thread, whether one of its elements is not finite.
template <class T, class Codecs, bool takes_runs>
__device__ bool encode_pass(const Codec& codec, const Pass& pass, bool own, int shift) {
  bool nonfinite = false;
  Codecs::visit(codec, [&](auto type) {
    nonfinite = encode_all<T, typename decltype(type)::type, takes_runs>(
        pass, own, codec.stochastic != 0, shift);
  });
  return nonfinite;
}

// Decodes; returns, to each thread, whether one of its elements is not finite.
template <class T, class Codecs, bool takes_runs>
__device__ bool decode_pass(const Codec& codec, Encoded from, T* output, std::int64_t n,
                            int shift) {
  bool nonfinite = false;
  Codecs::visit(codec, [&](auto type) {
    constexpr int kBlocks = takes_runs ? kRunBlocks : 0;
    nonfinite = decode_all<T, typename decltype(type)::type, kBlocks>(from, output, n, shift);
  });
  return nonfinite;
}

}  // namespace pycomm::cuda

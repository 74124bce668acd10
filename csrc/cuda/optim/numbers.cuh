// Moves a segment's numbers between memory and registers. A warp takes runs of 256 elements, the size
// of a block of 8-bit states. A lane takes two groups of four neighbours of a run, so that each access
// of a warp is contiguous for every type.
//
// Weights and states come in two kinds. One is for a single storage: it needs whole runs at aligned
// addresses and loads without a branch, so that all loads are issued before the first use. The other
// is for any storage.
#pragma once

#include "core/optim/root_half.h"
#include "core/optim/rounding.h"
#include "core/optim/split_float.h"
#include "core/optim/state8.h"
#include "core/rng.h"
#include "cuda/optim/table.h"
#include "cuda/quads.cuh"

namespace pycomm::cuda {

inline constexpr int kEight = 2 * kQuad;
static_assert(kRun == 32 * kEight && kRun == kStateBlock && kMixedRun % kRun == 0);

template <class T>
struct Eight {
  Quad<T> half[2];
  __device__ T& operator[](int i) { return half[i / kQuad].element[i % kQuad]; }
  __device__ const T& operator[](int i) const { return half[i / kQuad].element[i % kQuad]; }
};

// The index in the run of a lane's i-th element.
__device__ inline int offset(int i) {
  return i / kQuad * static_cast<int>(kRun / 2) + lane() * kQuad + i % kQuad;
}

// A run of elements of a segment: `left` from `at` on. Gradients may lie in an array of their own.
struct ElementRun {
  std::int64_t at;
  int left;
  const void* grads;
  std::int64_t grads_at;  // of the run in `grads`
};

// A lane's first group in an array. The segment has at most kMostInQuads elements, so that a number of
// 32 bits says which it is: then its address is one multiplication and addition.
inline constexpr std::int64_t kMostInQuads = kQuad * (std::int64_t{1} << 32);
template <class T>
__device__ auto quads_at(T* array, std::int64_t at) {
  using Group = std::conditional_t<std::is_const_v<T>, const Quad<std::remove_const_t<T>>, Quad<T>>;
  return reinterpret_cast<Group*>(array) +
         (static_cast<std::uint32_t>(at >> 2) + static_cast<std::uint32_t>(lane()));
}

template <class T>
__device__ Eight<T> load_eight(const T* array, std::int64_t at) {
  const auto* quads = quads_at(array, at);
  return {{quads[0], quads[32]}};
}

template <class T>
__device__ void store_eight(T* array, std::int64_t at, const Eight<T>& values) {
  auto* quads = quads_at(array, at);
  quads[0] = values.half[0];
  quads[32] = values.half[1];
}

// True if a number of a thread is NaN: one instruction asks for two of them.
__device__ inline bool have_nan(const float (&values)[kEight]) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kEight; i += 2) {
    found |= (values[i] != values[i]) | (values[i + 1] != values[i + 1]);
  }
  return found;
}

// Makes NaNs canonical.
__device__ inline void canonicalise(float (&values)[kEight]) {
  if (!have_nan(values)) return;
  stay_a_branch();
#pragma unroll
  for (int i = 0; i < kEight; ++i) values[i] = pycomm::store<float>(values[i]);
}

__device__ inline bool takes_quads(const void* data, Storage storage) {
  const auto unit = static_cast<std::uintptr_t>(kQuad * size_of(storage));
  return storage == Storage::none || reinterpret_cast<std::uintptr_t>(data) % unit == 0;
}

// The role of a state.
__device__ inline Role role_of(int number) {
  return number > 0 ? Role::second_moment : Role::first_moment;
}

// Random bits of a run's elements.
struct Dice {
  MixedBits bits;
  int begin = 0;         // of the run, among the runs that share a random key
  bool weights = false;  // true: weights are rounded at random; false: to nearest

  __device__ std::uint32_t operator()(int i) const { return bits(begin + offset(i)); }
  __device__ std::uint32_t operator()(Role role, int i) const {
    return rounding_bits(role, (*this)(i));
  }
  __device__ BFloat16 weight(float value, int i) const {
    if (!weights) return store<BFloat16>(value);
    return {float_to_bfloat16(value, (*this)(Role::weight, i))};
  }
  __device__ BFloat16 state(int number, float value, int i) const {
    return {float_to_bfloat16(value, (*this)(role_of(number), i))};
  }
};

// Weights and gradients of one storage each, for whole runs.
template <class T>
struct PlainWeights {  // no master weights
  static constexpr bool kRandom = std::is_same_v<T, BFloat16>;
  Eight<T> p, g;

  __device__ void load(const Segment& s, const ElementRun& run) {
    p = load_eight(static_cast<const T*>(s.param), run.at);
    g = load_eight(static_cast<const T*>(run.grads), run.grads_at);
  }
  __device__ void read(float (&weights)[kEight], float (&gradients)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      weights[i] = pycomm::load(p[i]);
      gradients[i] = pycomm::load(g[i]);
    }
  }
  __device__ void store(const Segment& s, const ElementRun& run, float (&weights)[kEight],
                        const Dice& dice) {
    if constexpr (!kRandom) canonicalise(weights);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if constexpr (kRandom) {
        p[i] = dice.weight(weights[i], i);
      } else {
        p[i] = weights[i];
      }
    }
    store_eight(static_cast<T*>(s.param), run.at, p);
  }
};

struct SplitWeights {  // bf16 and remainders
  static constexpr bool kRandom = false;
  Eight<std::uint16_t> high, low;
  Eight<BFloat16> g;

  __device__ void load(const Segment& s, const ElementRun& run) {
    high = load_eight(static_cast<const std::uint16_t*>(s.param), run.at);
    low = load_eight(static_cast<const std::uint16_t*>(s.master), run.at);
    g = load_eight(static_cast<const BFloat16*>(run.grads), run.grads_at);
  }
  __device__ void read(float (&weights)[kEight], float (&gradients)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      weights[i] = sum_of_halves(high[i], low[i]);
      gradients[i] = pycomm::load(g[i]);
    }
    if (!have_nan(weights)) return;
    stay_a_branch();
#pragma unroll
    for (int i = 0; i < kEight; ++i) weights[i] = join(high[i], low[i]);
  }
  __device__ void store(const Segment& s, const ElementRun& run, float (&weights)[kEight],
                        const Dice&) {
    canonicalise(weights);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const SplitFloat halves = split_canonical(weights[i]);
      high[i] = halves.hi;
      low[i] = halves.lo;
    }
    store_eight(static_cast<std::uint16_t*>(s.param), run.at, high);
    store_eight(static_cast<std::uint16_t*>(s.master), run.at, low);
  }
};

struct MasterWeights {  // fp32 beside bf16
  static constexpr bool kRandom = false;
  Eight<float> master;
  Eight<BFloat16> g;

  __device__ void load(const Segment& s, const ElementRun& run) {
    master = load_eight(static_cast<const float*>(s.master), run.at);
    g = load_eight(static_cast<const BFloat16*>(run.grads), run.grads_at);
  }
  __device__ void read(float (&weights)[kEight], float (&gradients)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      weights[i] = master[i];
      gradients[i] = pycomm::load(g[i]);
    }
  }
  __device__ void store(const Segment& s, const ElementRun& run, float (&weights)[kEight],
                        const Dice&) {
    canonicalise(weights);
    Eight<BFloat16> p;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      master[i] = weights[i];
      p[i] = {split_canonical(weights[i]).hi};
    }
    store_eight(static_cast<float*>(s.master), run.at, master);
    store_eight(static_cast<BFloat16*>(s.param), run.at, p);
  }
};

// States of one storage, for whole runs. kRandom is true if they are rounded at random. `roots` are
// those of the values, or null.
template <class T>
struct PlainState {
  static constexpr bool kRandom = std::is_same_v<T, BFloat16>;
  Eight<T> stored;

  __device__ void load(const Segment& s, int number, const ElementRun& run) {
    stored = load_eight(static_cast<const T*>(s.state[number]), run.at);
  }
  __device__ void read(int, float (&values)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = pycomm::load(stored[i]);
  }
  __device__ void store(const Segment& s, int number, const ElementRun& run,
                        float (&values)[kEight], const float*, const Dice& dice) {
    canonicalise(values);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if constexpr (kRandom) {
        stored[i] = {canonical_to_bfloat16(values[i], dice(role_of(number), i))};
      } else {
        stored[i] = values[i];
      }
    }
    store_eight(static_cast<T*>(s.state[number]), run.at, stored);
  }
};

// The scale of a block whose lanes have such magnitudes.
__device__ inline State8Scale scale_of(int number, std::uint32_t most) {
  return state8_scale(role_of(number), __reduce_max_sync(0xffffffffu, most));
}

// Writes the scale of a block, by all threads of a warp, for one state after the other.
template <class Index>
__device__ void store_largest(const Segment& s, int number, Index block, const State8Scale& scale) {
  if (number == 0) __syncwarp();  // all of them have read the old ones, of all states
  if (lane() == 0) s.largest[number][block] = scale.largest;
}

// A byte of a word. So written, a GPU converts it to fp32 in one instruction.
__device__ inline std::int32_t signed_byte(std::uint32_t word, int number) {
#if defined(__CUDA_ARCH__)
  std::int32_t byte;
  asm("bfe.s32 %0, %1, %2, 8;" : "=r"(byte) : "r"(word), "r"(8 * number));
  return byte;
#else
  return static_cast<std::int8_t>(word >> 8 * number);
#endif
}
__device__ inline std::int32_t unsigned_byte(std::uint32_t word, int number) {
#if defined(__CUDA_ARCH__)
  std::uint32_t byte;
  asm("bfe.u32 %0, %1, %2, 8;" : "=r"(byte) : "r"(word), "r"(8 * number));
  return static_cast<std::int32_t>(byte);
#else
  return static_cast<std::uint8_t>(word >> 8 * number);
#endif
}

// The low bytes of four words.
__device__ inline std::uint32_t low_bytes(const std::uint32_t* words) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(__byte_perm(words[0], words[1], 0x0040u),
                     __byte_perm(words[2], words[3], 0x0040u), 0x5410u);
#else
  return (words[0] & 0xffu) | (words[1] & 0xffu) << 8 | (words[2] & 0xffu) << 16 | words[3] << 24;
#endif
}

struct CodedState {
  static constexpr bool kRandom = true;
  std::uint32_t codes[2];  // four in a word
  float largest;

  __device__ void load(const Segment& s, int number, const ElementRun& run) {
    const auto* const words = words_at(s, number, run);
    codes[0] = words[0];
    codes[1] = words[32];
    largest = s.largest[number][block_of(run)];
  }
  __device__ void read(int number, float (&values)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const std::uint32_t word = codes[i / kQuad];
      values[i] = number > 0 ? decode_unsigned(unsigned_byte(word, i % kQuad), largest)
                             : decode_signed(signed_byte(word, i % kQuad), largest);
    }
  }
  __device__ void store(const Segment& s, int number, const ElementRun& run,
                        float (&values)[kEight], const float* roots, const Dice& dice) {
    const auto sizes = number > 0 ? Magnitudes::of_squares(values) : Magnitudes(values);
    const State8Scale scale = scale_of(number, sizes.most);
    store_largest(s, number, block_of(run), scale);
    std::uint32_t words[kEight];
    if (number == 0) {  // a factor of zero makes codes of zero
#pragma unroll
      for (int i = 0; i < kEight; ++i) words[i] = encode_signed(values[i], scale.factor, dice(i));
    } else {
      encode_roots(values, roots, sizes, scale.factor, dice, words);
    }
    auto* const to = words_at(s, number, run);
    to[0] = low_bytes(words);
    to[32] = low_bytes(words + kQuad);
  }

 private:
  __device__ static std::uint32_t block_of(const ElementRun& run) {
    return static_cast<std::uint32_t>(run.at >> 2) >> 6;
  }
  __device__ static std::uint32_t* words_at(const Segment& s, int number, const ElementRun& run) {
    return reinterpret_cast<std::uint32_t*>(
        quads_at(static_cast<std::uint8_t*>(s.state[number]), run.at));
  }
  __device__ static void encode_roots(const float (&values)[kEight], const float* roots,
                                      const Magnitudes& sizes, float factor, const Dice& dice,
                                      std::uint32_t (&words)[kEight]) {
    float made[kEight];
    if (roots == nullptr) {
      const bool moderate = sizes.are_between(kLeastRooted, 0x1.fffffep127f);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        made[i] = moderate ? moderate_root(values[i]) : std::sqrt(values[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      words[i] = encode_unsigned(roots == nullptr ? made[i] : roots[i], factor, dice(i));
    }
    if (sizes.least != 0 && factor != 0.0f) return;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (!(values[i] > 0.0f) || factor == 0.0f) words[i] = 0;
    }
  }
};

// Any storage, at any address, for a run of `left` elements. Missing elements are zeros. Lanes hold
// elements in the order above, or
struct InQuads {
  __device__ static int offset(int i) { return cuda::offset(i); }
};
// 32 elements apart: the order of sums (core/optim/square_sum.h).
struct Strided {
  __device__ static int offset(int i) { return i * 32 + lane(); }
};

template <class Order, class T>
__device__ bool whole(const T* run, int left) {
  return std::is_same_v<Order, InQuads> && left >= kRun &&
         reinterpret_cast<std::uintptr_t>(run) % alignof(Quad<T>) == 0;
}

template <class Order, class T>
__device__ Eight<T> load_some(const T* run, int left) {
  if (whole<Order>(run, left)) return load_eight(run, 0);
  Eight<T> values{};
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (Order::offset(i) < left) values[i] = run[Order::offset(i)];
  }
  return values;
}

template <class T>
__device__ void store_some(T* run, int left, const Eight<T>& values) {
  if (whole<InQuads>(run, left)) return store_eight(run, 0, values);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (offset(i) < left) run[offset(i)] = values[i];
  }
}

// Loads as fp32 through convert(stored), and stores back.
template <class Order, class T, class Convert>
__device__ void load_as(const void* data, std::int64_t at, int left, float* to, Convert convert) {
  const Eight<T> stored = load_some<Order>(static_cast<const T*>(data) + at, left);
#pragma unroll
  for (int i = 0; i < kEight; ++i) to[i] = convert(stored[i]);
}

template <class T, class Convert>
__device__ void store_as(void* data, std::int64_t at, int left, Convert convert) {
  Eight<T> made;
#pragma unroll
  for (int i = 0; i < kEight; ++i) made[i] = convert(i);
  store_some(static_cast<T*>(data) + at, left, made);
}

template <class Order>
__device__ void load_floats(Storage storage, const void* data, std::int64_t at, int left,
                            float* to) {
  switch (storage) {
    case Storage::f32:
      return load_as<Order, float>(data, at, left, to, [](float x) { return x; });
    case Storage::f16:
      return load_as<Order, Half>(data, at, left, to, [](Half x) { return pycomm::load(x); });
    default:
      return load_as<Order, BFloat16>(data, at, left, to,
                                      [](BFloat16 x) { return pycomm::load(x); });
  }
}

// To nearest.
__device__ inline void store_floats(Storage storage, const float* from, void* data, std::int64_t at,
                                    int left) {
  switch (storage) {
    case Storage::f32:
      return store_as<float>(data, at, left, [&](int i) { return pycomm::store<float>(from[i]); });
    case Storage::f16:
      return store_as<Half>(data, at, left, [&](int i) { return pycomm::store<Half>(from[i]); });
    default:
      return store_as<BFloat16>(data, at, left,
                                [&](int i) { return pycomm::store<BFloat16>(from[i]); });
  }
}

template <class Order = InQuads>
struct AnyWeights {
  static constexpr bool kRandom = true;
  float p[kEight], g[kEight];

  __device__ void load(const Segment& s, const ElementRun& run) {
    const auto [at, left, grads, grads_at] = run;
    load_floats<Order>(s.grad_storage, grads, grads_at, left, g);
    if (s.master_storage == Storage::remainder) {
      const auto high = load_some<Order>(static_cast<const std::uint16_t*>(s.param) + at, left);
      const auto low = load_some<Order>(static_cast<const std::uint16_t*>(s.master) + at, left);
#pragma unroll
      for (int i = 0; i < kEight; ++i) p[i] = join(high[i], low[i]);
    } else {
      const bool master = s.master_storage != Storage::none;
      load_floats<Order>(master ? s.master_storage : s.param_storage, master ? s.master : s.param,
                         at, left, p);
    }
  }
  __device__ void read(float (&weights)[kEight], float (&gradients)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      weights[i] = p[i];
      gradients[i] = g[i];
    }
  }
  __device__ void store(const Segment& s, const ElementRun& run, const float (&weights)[kEight],
                        const Dice& dice) {
    const auto [at, left, grads, grads_at] = run;
    const float (&p)[kEight] = weights;
    if (s.master_storage == Storage::none) {
      if (!dice.weights) return store_floats(s.param_storage, p, s.param, at, left);
      return store_as<BFloat16>(s.param, at, left, [&](int i) { return dice.weight(p[i], i); });
    }
    if (s.param_storage ==
        Storage::bf16) {  // rounded the same way with remainders and with fp32 weights
      store_as<std::uint16_t>(s.param, at, left, [&](int i) { return split(p[i]).hi; });
    } else {
      store_floats(s.param_storage, p, s.param, at, left);
    }
    if (s.master_storage == Storage::remainder) {
      store_as<std::uint16_t>(s.master, at, left, [&](int i) { return split(p[i]).lo; });
    } else {
      store_floats(s.master_storage, p, s.master, at, left);
    }
  }
};

template <class Order = InQuads>
struct AnyState {
  static constexpr bool kRandom = true;
  float loaded[kEight];

  __device__ void load(const Segment& s, int number, const ElementRun& run) {
    const std::int64_t at = run.at;
    const int left = run.left;
    const void* const data = s.state[number];
    if (s.state_storage[number] == Storage::code8) {
      const float largest = s.largest[number][at / kStateBlock];
      load_as<Order, std::uint8_t>(data, at, left, loaded, [&](std::uint8_t code) {
        return number > 0 ? decode_unsigned(code, largest)
                          : decode_signed(static_cast<std::int8_t>(code), largest);
      });
    } else if (s.state_storage[number] == Storage::f16 && number > 0) {
      load_as<Order, Half>(data, at, left, loaded, [](Half root) { return load_root(root.bits); });
    } else {
      load_floats<Order>(s.state_storage[number], data, at, left, loaded);
    }
  }
  __device__ void read(int, float (&values)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) values[i] = loaded[i];
  }
  __device__ void store(const Segment& s, int number, const ElementRun& run,
                        const float (&values)[kEight], const float*, const Dice& dice) const {
    const std::int64_t at = run.at;
    const int left = run.left;
    void* const data = s.state[number];
    const Storage storage = s.state_storage[number];
    if (storage == Storage::code8) {
      std::uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        most = max(most, offset(i) < left ? magnitude(values[i]) : 0u);
      }
      const State8Scale scale = scale_of(number, most);
      store_largest(s, number, at / kStateBlock, scale);
      store_as<std::uint8_t>(
          data, at, left, [&](int i) { return encode(number, values[i], scale.factor, dice(i)); });
    } else if (storage == Storage::f16 && number > 0) {
      store_as<Half>(data, at, left,
                     [&](int i) { return store_root(values[i], dice(Role::second_moment, i)); });
    } else if (storage == Storage::f16) {
      store_as<Half>(data, at, left, [&](int i) {
        return Half{float_to_half(values[i], dice(Role::first_moment, i))};
      });
    } else if (storage == Storage::bf16) {
      store_as<BFloat16>(data, at, left, [&](int i) { return dice.state(number, values[i], i); });
    } else {
      store_floats(storage, values, data, at, left);
    }
  }

 private:
  __device__ static std::uint8_t encode(int number, float value, float factor, std::uint32_t bits) {
    if (factor == 0.0f || (number > 0 && !(value > 0.0f))) return 0;
    return static_cast<std::uint8_t>(number > 0 ? encode_unsigned(std::sqrt(value), factor, bits)
                                                : encode_signed(value, factor, bits));
  }
};

}  // namespace pycomm::cuda

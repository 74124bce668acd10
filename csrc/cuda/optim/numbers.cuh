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

template <class T>
__device__ Eight<T> load_eight(const T* run) {
  const auto* quads = reinterpret_cast<const Quad<T>*>(run) + lane();
  return {{quads[0], quads[32]}};
}

template <class T>
__device__ void store_eight(T* run, const Eight<T>& values) {
  auto* quads = reinterpret_cast<Quad<T>*>(run) + lane();
  quads[0] = values.half[0];
  quads[32] = values.half[1];
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

  __device__ std::uint32_t operator()(Role role, int i) const {
    return rounding_bits(role, bits(begin + offset(i)));
  }
  __device__ BFloat16 weight(float value, int i) const {
    if (!weights) return store<BFloat16>(value);
    return {float_to_bfloat16(value, (*this)(Role::weight, i))};
  }
  __device__ BFloat16 state(int number, float value, int i) const {
    return {float_to_bfloat16(value, (*this)(role_of(number), i))};
  }
};

// Weights and gradients of one storage each. load() takes the address of the run's gradients.
template <class T>
struct PlainWeights {  // no master weights
  static constexpr bool kRandom = std::is_same_v<T, BFloat16>;
  Eight<T> p, g;

  __device__ void load(const Segment& s, const void* grads, std::int64_t at, int) {
    p = load_eight(static_cast<const T*>(s.param) + at);
    g = load_eight(static_cast<const T*>(grads));
  }
  __device__ float weight(int i) const { return pycomm::load(p[i]); }
  __device__ float gradient(int i) const { return pycomm::load(g[i]); }
  __device__ void set(int i, float value, const Dice& dice) {
    if constexpr (kRandom) {
      p[i] = dice.weight(value, i);
    } else {
      p[i] = pycomm::store<T>(value);
    }
  }
  __device__ void store(const Segment& s, std::int64_t at, int, const Dice&) const {
    store_eight(static_cast<T*>(s.param) + at, p);
  }
};

struct SplitWeights {  // bf16 and remainders
  static constexpr bool kRandom = false;
  Eight<std::uint16_t> high, low;
  Eight<BFloat16> g;

  __device__ void load(const Segment& s, const void* grads, std::int64_t at, int) {
    high = load_eight(static_cast<const std::uint16_t*>(s.param) + at);
    low = load_eight(static_cast<const std::uint16_t*>(s.master) + at);
    g = load_eight(static_cast<const BFloat16*>(grads));
  }
  __device__ float weight(int i) const { return join(high[i], low[i]); }
  __device__ float gradient(int i) const { return pycomm::load(g[i]); }
  __device__ void set(int i, float value, const Dice&) {
    const SplitFloat halves = split(value);
    high[i] = halves.hi;
    low[i] = halves.lo;
  }
  __device__ void store(const Segment& s, std::int64_t at, int, const Dice&) const {
    store_eight(static_cast<std::uint16_t*>(s.param) + at, high);
    store_eight(static_cast<std::uint16_t*>(s.master) + at, low);
  }
};

struct MasterWeights {  // fp32 beside bf16
  static constexpr bool kRandom = false;
  Eight<float> master;
  Eight<BFloat16> g;

  __device__ void load(const Segment& s, const void* grads, std::int64_t at, int) {
    master = load_eight(static_cast<const float*>(s.master) + at);
    g = load_eight(static_cast<const BFloat16*>(grads));
  }
  __device__ float weight(int i) const { return master[i]; }
  __device__ float gradient(int i) const { return pycomm::load(g[i]); }
  __device__ void set(int i, float value, const Dice&) { master[i] = pycomm::store<float>(value); }
  __device__ void store(const Segment& s, std::int64_t at, int, const Dice&) const {
    Eight<BFloat16> p;
#pragma unroll
    for (int i = 0; i < kEight; ++i) p[i] = {split(master[i]).hi};
    store_eight(static_cast<float*>(s.master) + at, master);
    store_eight(static_cast<BFloat16*>(s.param) + at, p);
  }
};

// States of one storage. kRandom is true if they are rounded at random.
template <class T>
struct PlainState {
  static constexpr bool kRandom = std::is_same_v<T, BFloat16>;
  Eight<T> values;

  __device__ void load(const Segment& s, int number, std::int64_t at, int) {
    values = load_eight(static_cast<const T*>(s.state[number]) + at);
  }
  __device__ float value(int, int i) const { return pycomm::load(values[i]); }
  __device__ void set(int number, int i, float value, const Dice& dice) {
    if constexpr (kRandom) {
      values[i] = dice.state(number, value, i);
    } else {
      values[i] = pycomm::store<T>(value);
    }
  }
  __device__ void store(const Segment& s, int number, std::int64_t at, int, const Dice&) const {
    store_eight(static_cast<T*>(s.state[number]) + at, values);
  }
};

__device__ inline float decode(int number, std::uint8_t code, float largest) {
  return number > 0 ? decode_unsigned(code, largest) : decode_signed(code, largest);
}

// Not for an inverse of zero: if all values are zero, or one is not finite, all codes are zero.
__device__ inline std::uint8_t encode(int number, float value, float inverse, const Dice& dice,
                                      int i) {
  const std::uint32_t random = dice(role_of(number), i);
  return number > 0 ? encode_unsigned(value, inverse, random)
                    : encode_signed(value, inverse, random);
}

// The scale of a block's first `left` values.
__device__ inline State8Scale scale_of(const float* values, int left) {
  std::uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kEight; ++i) most = max(most, offset(i) < left ? magnitude(values[i]) : 0u);
  return state8_scale(__reduce_max_sync(0xffffffffu, most));
}

// Writes the scale of a block, by all threads of a warp.
__device__ inline void store_largest(const Segment& s, int number, std::int64_t at,
                                     const State8Scale& scale) {
  __syncwarp();  // all of them have read the old one
  if (lane() == 0) s.largest[number][at / kStateBlock] = scale.largest;
}

struct CodedState {
  static constexpr bool kRandom = true;
  Eight<std::uint8_t> codes;
  float largest;
  float values[kEight];

  __device__ void load(const Segment& s, int number, std::int64_t at, int) {
    codes = load_eight(static_cast<const std::uint8_t*>(s.state[number]) + at);
    largest = s.largest[number][at / kStateBlock];
  }
  __device__ float value(int number, int i) const { return decode(number, codes[i], largest); }
  __device__ void set(int, int i, float value, const Dice&) { values[i] = value; }
  __device__ void store(const Segment& s, int number, std::int64_t at, int, const Dice& dice) {
    const State8Scale scale = scale_of(values, kRun);
    store_largest(s, number, at, scale);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      codes[i] = encode(number, values[i], scale.inverse, dice, i);
    }
    if (scale.inverse == 0.0f) codes = {};
    store_eight(static_cast<std::uint8_t*>(s.state[number]) + at, codes);
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
  if (whole<Order>(run, left)) return load_eight(run);
  Eight<T> values{};
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (Order::offset(i) < left) values[i] = run[Order::offset(i)];
  }
  return values;
}

template <class T>
__device__ void store_some(T* run, int left, const Eight<T>& values) {
  if (whole<InQuads>(run, left)) return store_eight(run, values);
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

  __device__ void load(const Segment& s, const void* grads, std::int64_t at, int left) {
    load_floats<Order>(s.grad_storage, grads, 0, left, g);
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
  __device__ float weight(int i) const { return p[i]; }
  __device__ float gradient(int i) const { return g[i]; }
  __device__ void set(int i, float value, const Dice&) { p[i] = value; }
  __device__ void store(const Segment& s, std::int64_t at, int left, const Dice& dice) const {
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
  float values[kEight];

  __device__ void load(const Segment& s, int number, std::int64_t at, int left) {
    const void* const data = s.state[number];
    if (s.state_storage[number] == Storage::code8) {
      const float largest = s.largest[number][at / kStateBlock];
      load_as<Order, std::uint8_t>(
          data, at, left, values, [&](std::uint8_t code) { return decode(number, code, largest); });
    } else if (s.state_storage[number] == Storage::f16 && number > 0) {
      load_as<Order, Half>(data, at, left, values, [](Half root) { return load_root(root.bits); });
    } else {
      load_floats<Order>(s.state_storage[number], data, at, left, values);
    }
  }
  __device__ float value(int, int i) const { return values[i]; }
  __device__ void set(int, int i, float value, const Dice&) { values[i] = value; }
  __device__ void store(const Segment& s, int number, std::int64_t at, int left,
                        const Dice& dice) const {
    void* const data = s.state[number];
    const Storage storage = s.state_storage[number];
    if (storage == Storage::code8) {
      const State8Scale scale = scale_of(values, left);
      store_largest(s, number, at, scale);
      store_as<std::uint8_t>(data, at, left, [&](int i) -> std::uint8_t {
        return scale.inverse == 0.0f ? 0 : encode(number, values[i], scale.inverse, dice, i);
      });
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
};

}  // namespace pycomm::cuda

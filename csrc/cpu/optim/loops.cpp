#include "cpu/optim/loops.h"

#include <algorithm>

#include <tuple>

#include "core/optim/root_half.h"
#include "core/optim/rounding.h"
#include "core/optim/split_float.h"
#include "cpu/executor/loops.h"

namespace pycomm::cpu {
namespace {

template <class T>
PYCOMM_CLONES void widen(const T* from, std::int64_t n, float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
}

template <class T>
PYCOMM_CLONES void narrow(const float* from, std::int64_t n, T* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = store<T>(from[i]);
}

PYCOMM_CLONES void square_all(const Half* from, std::int64_t n, float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = load_root(from[i].bits);
}

// A number of 16 bits.
template <class T, Role role>
PYCOMM_HD T round_at_random(float value, std::uint32_t bits) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return {float_to_bfloat16(value, rounding_bits(role, bits))};
  } else if constexpr (role == Role::second_moment) {
    return store_root(value, rounding_bits(role, bits));
  } else {
    return {float_to_half(value, rounding_bits(role, bits))};
  }
}

template <class T, Role role>
PYCOMM_CLONES void narrow_at_random(const float* from, std::int64_t n, const std::uint32_t* random,
                                    T* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = round_at_random<T, role>(from[i], random[i]);
}

// Without random bits: to nearest.
template <class T>
void narrow_as(Role role, const float* from, std::int64_t n, const std::uint32_t* random, T* to) {
  if (random == nullptr) return narrow(from, n, to);
  switch (role) {
    case Role::weight:
      return narrow_at_random<T, Role::weight>(from, n, random, to);
    case Role::first_moment:
      return narrow_at_random<T, Role::first_moment>(from, n, random, to);
    case Role::second_moment:
      return narrow_at_random<T, Role::second_moment>(from, n, random, to);
  }
}

PYCOMM_CLONES void join_all(const std::uint16_t* hi, const std::uint16_t* lo, std::int64_t n,
                            float* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = join(hi[i], lo[i]);
}

PYCOMM_CLONES void split_all(const float* from, std::int64_t n, std::uint16_t* hi,
                             std::uint16_t* lo) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const SplitFloat halves = split(from[i]);
    hi[i] = halves.hi;
    lo[i] = halves.lo;
  }
}

PYCOMM_CLONES void split_off(const float* from, std::int64_t n, std::uint16_t* hi) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) hi[i] = split(from[i]).hi;
}

template <Role role>
PYCOMM_CLONES void decode(const std::uint8_t* from, const float* largest, std::int64_t n,
                          float* to) {
  for (std::int64_t start = 0; start < n; start += kStateBlock) {
    const std::int64_t end = std::min(start + kStateBlock, n);
    const float scale = largest[start / kStateBlock];
#pragma omp simd
    for (std::int64_t i = start; i < end; ++i) {
      to[i] = role == Role::second_moment ? decode_unsigned(from[i], scale)
                                          : decode_signed(static_cast<std::int8_t>(from[i]), scale);
    }
  }
}

// With an element's random bits, or to nearest without.
template <Role role, class... Bits>
PYCOMM_HD std::uint8_t encode_one(float value, float factor, Bits... bits) {
  if constexpr (role == Role::second_moment) {
    const std::uint32_t code = encode_unsigned(std::sqrt(value), factor, bits...);
    // Zero, and what is below, gets 1, too. (With "?", all this would be a branch, and the loop would
    // not vectorise.)
    return static_cast<std::uint8_t>(code - static_cast<std::uint32_t>(!(value > 0.0f)));
  } else {
    return static_cast<std::uint8_t>(encode_signed(value, factor, bits...));
  }
}

template <Role role, bool at_random>
PYCOMM_CLONES void encode(const float* from, std::int64_t n, const std::uint32_t* random,
                          std::uint8_t* to, float* largest) {
  for (std::int64_t start = 0; start < n; start += kStateBlock) {
    const std::int64_t end = std::min(start + kStateBlock, n);
    std::uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (std::int64_t i = start; i < end; ++i) most = std::max(most, magnitude(from[i]));
    const State8Scale scale = state8_scale(role, most);
    largest[start / kStateBlock] = scale.largest;
    if (scale.factor == 0.0f) {  // all zeros, or not finite
      std::fill(to + start, to + end, std::uint8_t{0});
      continue;
    }
#pragma omp simd
    for (std::int64_t i = start; i < end; ++i) {
      if constexpr (at_random) {
        to[i] = encode_one<role>(from[i], scale.factor, random[i]);
      } else {
        to[i] = encode_one<role>(from[i], scale.factor);
      }
    }
  }
}

template <Role role>
void encode_as(const float* from, std::int64_t n, const std::uint32_t* random, std::uint8_t* to,
               float* largest) {
  random != nullptr ? encode<role, true>(from, n, random, to, largest)
                    : encode<role, false>(from, n, nullptr, to, largest);
}

// Accessors for a chunk's weights and gradients, one per format.
struct Fp32Weights {
  float* p;
  const float* g;

  PYCOMM_HD explicit Fp32Weights(const ChunkView& chunk)
      : p(static_cast<float*>(chunk.p)), g(static_cast<const float*>(chunk.g)) {}
  PYCOMM_HD float weight(std::int64_t i) const { return p[i]; }
  PYCOMM_HD float gradient(std::int64_t i) const { return g[i]; }
  PYCOMM_HD void set(std::int64_t i, float value) const { p[i] = store<float>(value); }
};

struct Bf16Weights {
  BFloat16* p;
  const BFloat16* g;

  PYCOMM_HD explicit Bf16Weights(const ChunkView& chunk)
      : p(static_cast<BFloat16*>(chunk.p)), g(static_cast<const BFloat16*>(chunk.g)) {}
  PYCOMM_HD float weight(std::int64_t i) const { return load(p[i]); }
  PYCOMM_HD float gradient(std::int64_t i) const { return load(g[i]); }
  PYCOMM_HD void set(std::int64_t i, float value) const { p[i] = store<BFloat16>(value); }
};

struct SplitWeights {
  std::uint16_t *hi, *lo;
  const BFloat16* g;

  PYCOMM_HD explicit SplitWeights(const ChunkView& chunk)
      : hi(static_cast<std::uint16_t*>(chunk.p)),
        lo(chunk.remainder),
        g(static_cast<const BFloat16*>(chunk.g)) {}
  PYCOMM_HD float weight(std::int64_t i) const { return join(hi[i], lo[i]); }
  PYCOMM_HD float gradient(std::int64_t i) const { return load(g[i]); }
  PYCOMM_HD void set(std::int64_t i, float value) const {
    const SplitFloat halves = split(value);
    hi[i] = halves.hi;
    lo[i] = halves.lo;
  }
};

// A state in its stored format.
template <class State, Role role>
PYCOMM_HD State store_state(float value, const MixedBits& random, std::int64_t place) {
  if constexpr (std::is_same_v<State, BFloat16>) {
    return round_at_random<State, role>(value, random(place));
  } else {
    return store<State>(value);
  }
}

template <class Element, class Weights, class State>
PYCOMM_CLONES void update_loop(const Element& given, const ChunkView& chunk) {
  constexpr int n_states = Element::kStates;
  const Element element = given;
  const Weights weights(chunk);
  const float scale = chunk.scale;
  State* a = static_cast<State*>(chunk.state[0]);
  State* b = static_cast<State*>(chunk.state[1]);
  State* c = static_cast<State*>(chunk.state[2]);
  [[maybe_unused]] const MixedBits random = chunk.random;
  PYCOMM_INDEPENDENT
  for (std::int64_t i = 0; i < chunk.n; ++i) {
    float weight = weights.weight(i), first = 0.0f, second = 0.0f, third = 0.0f;
    if constexpr (n_states > 0) first = load(a[i]);
    if constexpr (n_states > 1) second = load(b[i]);
    if constexpr (n_states > 2) third = load(c[i]);
    element(weights.gradient(i) * scale, weight, first, second, third);
    weights.set(i, weight);
    if constexpr (n_states > 0) a[i] = store_state<State, Role::first_moment>(first, random, i);
    if constexpr (n_states > 1) b[i] = store_state<State, Role::second_moment>(second, random, i);
    if constexpr (n_states > 2) c[i] = store_state<State, Role::second_moment>(third, random, i);
  }
}

template <class Weights, class Element>
void update_states(const Element& element, const ChunkView& chunk) {
  if (Element::kStates > 0 && chunk.bf16_states) {
    update_loop<Element, Weights, BFloat16>(element, chunk);
  } else {
    update_loop<Element, Weights, float>(element, chunk);
  }
}

// A fused multiply-add gives the same bits here, because the square is exact.
template <class T>
PYCOMM_CLONES PYCOMM_CONTRACT double square_sum_of(const T* values, std::int64_t n) {
  return sum_block(n, [values](std::int64_t i) __attribute__((always_inline)) {
    const double value = load(values[i]);
    return value * value;
  });
}

}  // namespace

float* load_chunk(const Numbers& numbers, std::int64_t at, std::int64_t n, float* buffer) {
  switch (numbers.storage) {
    case Storage::none:
      return nullptr;
    case Storage::f32:
      return reinterpret_cast<float*>(numbers.data) + at;
    case Storage::f16: {
      const auto* from = reinterpret_cast<const Half*>(numbers.data) + at;
      numbers.role == Role::second_moment ? square_all(from, n, buffer) : widen(from, n, buffer);
      break;
    }
    case Storage::bf16:
      widen(reinterpret_cast<const BFloat16*>(numbers.data) + at, n, buffer);
      break;
    case Storage::remainder:
      join_all(numbers.bfloat16 + at, reinterpret_cast<const std::uint16_t*>(numbers.data) + at, n,
               buffer);
      break;
    case Storage::code8: {
      const auto* codes = reinterpret_cast<const std::uint8_t*>(numbers.data) + at;
      const float* largest = numbers.largest + at / kStateBlock;
      numbers.role == Role::second_moment ? decode<Role::second_moment>(codes, largest, n, buffer)
                                          : decode<Role::first_moment>(codes, largest, n, buffer);
      break;
    }
  }
  return buffer;
}

PYCOMM_CLONES void draw(const MixedBits& given, std::int64_t n, std::uint32_t* to) {
  const MixedBits random = given;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) to[i] = random(i);
}

void store_chunk(const Numbers& numbers, std::int64_t at, std::int64_t n, const float* values,
                 const std::uint32_t* random) {
  switch (numbers.storage) {
    case Storage::none:
    case Storage::f32:
      break;  // updated in place
    case Storage::f16:
      narrow_as(numbers.role, values, n, random, reinterpret_cast<Half*>(numbers.data) + at);
      break;
    case Storage::bf16:
      narrow_as(numbers.role, values, n, random, reinterpret_cast<BFloat16*>(numbers.data) + at);
      break;
    case Storage::remainder:
      split_all(values, n, numbers.bfloat16 + at,
                reinterpret_cast<std::uint16_t*>(numbers.data) + at);
      break;
    case Storage::code8: {
      auto* codes = reinterpret_cast<std::uint8_t*>(numbers.data) + at;
      float* largest = numbers.largest + at / kStateBlock;
      numbers.role == Role::second_moment
          ? encode_as<Role::second_moment>(values, n, random, codes, largest)
          : encode_as<Role::first_moment>(values, n, random, codes, largest);
      break;
    }
  }
}

void store_beside(const Numbers& param, std::int64_t at, std::int64_t n, const float* weights) {
  if (param.storage == Storage::bf16) {
    split_off(weights, n, reinterpret_cast<std::uint16_t*>(param.data) + at);
  } else {
    store_chunk(param, at, n, weights, nullptr);
  }
}

template <class Element>
void update_chunk(const Element& element, const ChunkView& chunk) {
  switch (chunk.weights) {
    case Weights::fp32:
      return update_states<Fp32Weights>(element, chunk);
    case Weights::bf16:
      return update_states<Bf16Weights>(element, chunk);
    case Weights::split:
      return update_states<SplitWeights>(element, chunk);
  }
}

// Instantiates update_chunk() for all rules, for cpu/optim/step.cpp.
template <class... Elements>
constexpr auto updates_of(TypeList<Elements...>) {
  return std::tuple{&update_chunk<Elements>...};
}
template <class Table>
struct UpdatesOf;
template <class... Rows>
struct UpdatesOf<RuleTable<Rows...>> {
  static constexpr auto all = std::tuple_cat(updates_of(typename Rows::Elements{})...);
};
template struct UpdatesOf<Rules>;

PYCOMM_CLONES LambSums lamb_sums(const Lamb& given, const ChunkView& chunk) {
  const Lamb lamb = given;
  const float* g = static_cast<const float*>(chunk.g);
  const float* p = static_cast<const float*>(chunk.p);
  const float* first = static_cast<const float*>(chunk.state[0]);
  const float* second = static_cast<const float*>(chunk.state[1]);
  float u[kChunk];
#pragma omp simd
  for (std::int64_t i = 0; i < chunk.n; ++i) {
    float m = first[i], v = second[i];
    u[i] = lamb.direction(g[i] * chunk.scale, p[i], m, v);
  }
  return {square_sum_of(p, chunk.n), square_sum_of(u, chunk.n)};
}

double square_sum(const Numbers& numbers, std::int64_t at, std::int64_t n) {
  switch (numbers.storage) {
    case Storage::f32:
      return square_sum_of(reinterpret_cast<const float*>(numbers.data) + at, n);
    case Storage::f16:
      return square_sum_of(reinterpret_cast<const Half*>(numbers.data) + at, n);
    default:
      return square_sum_of(reinterpret_cast<const BFloat16*>(numbers.data) + at, n);
  }
}

}  // namespace pycomm::cpu

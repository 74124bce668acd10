// The numerics of optimizers: storage formats, with all their codes and all fp32 patterns; factors;
// sums.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "core/optim/root_half.h"
#include "core/optim/split_float.h"
#include "core/optim/square_sum.h"
#include "core/optim/state8.h"
#include "core/optim/table.h"
#include "cpu/executor/loops.h"
#include "cpu/optim/loops.h"
#include "support/dice.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

// With sanitizers, exhaustive tests would take minutes, so they check only every 1021st piece (a
// prime).
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kEvery = 1021;
#else
constexpr std::int64_t kEvery = 1;
#endif

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::min();  // normal

std::string text(double value) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.9g", value);
  return digits;
}

// Calls visit(piece) for 0 .. pieces, on all processors.
void on_all_processors(std::int64_t pieces, const std::function<void(std::int64_t)>& visit) {
  std::atomic<std::int64_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (std::int64_t piece; (piece = next.fetch_add(kEvery)) < pieces;) visit(piece);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The number of errors of split and join among `n` patterns from `first`.
PYCOMM_CLONES std::int64_t wrong_splits(std::uint32_t first, std::int64_t n,
                                        const std::uint16_t* hi, const float* joined) {
  std::int64_t wrong = 0;
#pragma omp simd reduction(+ : wrong)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = first + static_cast<std::uint32_t>(i);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t back = bit_cast<std::uint32_t>(joined[i]);
    // Rounding to nearest, ties away from zero: at most half a unit up, less than half a unit down.
    const std::uint32_t above = (static_cast<std::uint32_t>(hi[i]) << 16) - bits + 0x7fffu;
    const bool right =
        nan ? hi[i] == 0x7fc0u && back == 0x7fc00000u : back == bits && above < 65536;
    wrong += right ? 0 : 1;
  }
  return wrong;
}

// All 2^32 patterns, through the loops that optimizer steps use.
void every_number_survives_the_split() {
  std::atomic<std::int64_t> wrong = 0;
  on_all_processors((std::int64_t{1} << 32) / cpu::kChunk, [&](std::int64_t piece) {
    float values[cpu::kChunk], joined[cpu::kChunk];
    std::uint16_t hi[cpu::kChunk], lo[cpu::kChunk];
    const auto first = static_cast<std::uint32_t>(piece * cpu::kChunk);
    for (std::uint32_t i = 0; i < cpu::kChunk; ++i) values[i] = bit_cast<float>(first + i);
    const cpu::Numbers numbers{Storage::remainder, Role::weight, reinterpret_cast<std::byte*>(lo),
                               nullptr, hi};
    cpu::store_chunk(numbers, 0, cpu::kChunk, values, nullptr);
    cpu::load_chunk(numbers, 0, cpu::kChunk, joined);
    wrong += wrong_splits(first, cpu::kChunk, hi, joined);
  });
  PYCOMM_CHECK(wrong == 0, std::to_string(wrong) + " patterns do not survive");
}

// All pairs of halves, including those that no split produces, because callers may edit parameters
// between steps. A finite `hi` must give a finite number within half a unit.
PYCOMM_CLONES std::int64_t wrong_joins(std::uint32_t high, std::int64_t n, const float* joined) {
  std::int64_t wrong = 0;
#pragma omp simd reduction(+ : wrong)
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = bit_cast<std::uint32_t>(joined[i]);
    const bool finite = (bits & 0x7fffffffu) < 0x7f800000u;
    wrong += finite && bits - high + 0x8000u <= 0x10000u ? 0 : 1;
  }
  return wrong;
}

void no_finite_number_becomes_nan() {
  std::atomic<std::int64_t> wrong = 0;
  on_all_processors(1 << 16, [&](std::int64_t half) {
    const auto high = static_cast<std::uint16_t>(half);
    if ((high & 0x7f80u) == 0x7f80u) return;
    std::uint16_t hi[cpu::kChunk], lo[cpu::kChunk];
    float joined[cpu::kChunk];
    std::fill(hi, hi + cpu::kChunk, high);
    const cpu::Numbers numbers{Storage::remainder, Role::weight, reinterpret_cast<std::byte*>(lo),
                               nullptr, hi};
    for (std::uint32_t first = 0; first < 1u << 16; first += cpu::kChunk) {
      for (std::uint32_t i = 0; i < cpu::kChunk; ++i) lo[i] = static_cast<std::uint16_t>(first + i);
      cpu::load_chunk(numbers, 0, cpu::kChunk, joined);
      wrong += wrong_joins(static_cast<std::uint32_t>(high) << 16, cpu::kChunk, joined);
    }
  });
  PYCOMM_CHECK(wrong == 0, std::to_string(wrong) + " pairs give something else");
}

// Checks that a value between two neighbours is rounded up if its distance from the lower one
// exceeds the fraction that the random bits stand for. Close to that fraction, either result is
// right.
template <class Store>
void check_fair(double value, double below, double above, const Store& store) {
  constexpr double kClose = 0x1p-11;  // some ulps of the value
  const double distance = (value - below) / (above - below);
  for (const double share : {distance - kClose, distance + kClose, 0.25, 0.75}) {
    if (share < 0.0 || share >= 1.0 || std::fabs(share - distance) < kClose / 2) continue;
    const double made = store(static_cast<std::uint32_t>(share * 0x1p32));
    PYCOMM_CHECK(std::fabs(made - (distance > share ? above : below)) <= 1e-5 * std::fabs(made),
                 text(value) + " with bits " + text(share) + " becomes " + text(made));
  }
}

constexpr std::uint32_t kDice[] = {0, 1u << 31, 0xffffffffu};

// Every root is its own code for any random bits. All other values become a neighbour and never
// zero.
void roots_in_half() {
  for (const std::uint32_t random : kDice) {
    for (std::uint32_t bits = 0; bits <= 0x7c00u; ++bits) {
      PYCOMM_CHECK(store_root(load_root(bits), random).bits == bits,
                   "root " + std::to_string(bits));
    }
    PYCOMM_CHECK(store_root(bit_cast<float>(0x7fc00000u), random).bits == 0x7e00u, "NaN");
    PYCOMM_CHECK(store_root(kLargest, random).bits == 0x7bffu, "finite stays finite");
  }
  for (std::int64_t bits = 1; bits < 0x7f800000; bits += 997 * kEvery) {
    const float value = bit_cast<float>(static_cast<std::uint32_t>(bits));
    const double root = std::sqrt(static_cast<double>(value));
    if (root >= 65504) continue;
    const double unit = std::max(std::ldexp(1.0, std::ilogb(root) - 10), 0x1p-24);
    const double below = std::floor(root / unit) * unit, above = below + unit;
    const auto store = [&](std::uint32_t random) {
      const double made = load(store_root(value, random));
      PYCOMM_CHECK(made > 0, "the root of " + text(value) + " is zero");
      return made == 0x1p-24 && below == 0.0 ? -1.0 : made * made;
    };
    if (below == 0.0) {
      PYCOMM_CHECK(store(0) == -1.0, "the least root");
    } else {
      check_fair(value, below * below, above * above, store);
    }
  }
}

// Every number in fp16 is its own rounding for any random bits. All other values become a neighbour.
void halves_at_random() {
  for (const std::uint32_t random : kDice) {
    for (std::uint32_t bits = 0; bits <= 0xffffu; ++bits) {
      const float value = half_to_float(static_cast<std::uint16_t>(bits));
      const std::uint32_t want = value == value ? bits : 0x7e00u;
      PYCOMM_CHECK(float_to_half(value, random) == want, "half " + std::to_string(bits));
    }
    PYCOMM_CHECK(float_to_half(kLargest, random) == 0x7bffu, "finite stays finite");
    PYCOMM_CHECK(float_to_half(-65535.0f, random) == 0xfbffu, "finite stays finite");
  }
  for (std::int64_t bits = 1; bits < 0x477fe000; bits += 997 * kEvery) {
    const float size = bit_cast<float>(static_cast<std::uint32_t>(bits));
    const double unit = std::ldexp(1.0, std::max(std::ilogb(size), -14) - 10);
    const double below = std::floor(size / unit) * unit, above = below + unit;
    for (const float sign : {1.0f, -1.0f}) {
      check_fair(sign * size, sign * below, sign * above, [&](std::uint32_t random) {
        return half_to_float(float_to_half(sign * size, ~random));  // large bits round up
      });
    }
  }
}

// The high 16 bits for one role say nothing of the bits for another.
void roles_are_independent() {
  const auto high = [](Role role, std::uint32_t bits) { return rounding_bits(role, bits) >> 16; };
  const Role roles[] = {Role::weight, Role::first_moment, Role::second_moment};
  for (const Role one : roles) {
    for (const Role other : roles) {
      if (one == other) continue;
      // Words with bits of their own in one half and the same in the other, for which `one` is 0x1234.
      std::vector<bool> seen(0x10000);
      for (std::uint32_t free = 0; free < 0x10000u; ++free) {
        for (const std::uint32_t bits :
             {free << 16 | 0x1234u, 0x12340000u | free, (free ^ 0x1234u) << 16 | free}) {
          if (high(one, bits) == 0x1234u) seen[high(other, bits)] = true;
        }
      }
      PYCOMM_CHECK(std::count(seen.begin(), seen.end(), true) == 0x10000, "roles depend");
    }
  }
}

const float kMagnitudes[] = {kSmallest, 1e-30f, 0.7f, 1.0f, 3.14159f, 1e30f, 0x1p126f, kLargest};

// Codes as they are stored, with or without random bits.
template <class... Bits>
std::int8_t first_code(float value, float factor, Bits... bits) {
  return static_cast<std::int8_t>(encode_signed(value, factor, bits...));
}
template <class... Bits>
std::uint8_t second_code(float value, float factor, Bits... bits) {
  return value > 0.0f
             ? static_cast<std::uint8_t>(encode_unsigned(std::sqrt(value), factor, bits...))
             : std::uint8_t{0};
}

State8Scale scale_for(Role role, float largest) {
  return state8_scale(role, bit_cast<std::uint32_t>(largest));
}

constexpr std::uint32_t kMiddle = 0x80008000u;  // of the random bits for both moments

// Encoding a decoded code gives the code, for any magnitude. Larger codes stand for larger numbers.
void codes_are_fixed_points() {
  for (const float largest : kMagnitudes) {
    const State8Scale first = scale_for(Role::first_moment, largest),
                      second = scale_for(Role::second_moment, largest);
    PYCOMM_CHECK(first.largest == largest && second.largest == largest,
                 "the scale is the largest magnitude");
    float last = -std::numeric_limits<float>::infinity();
    for (int q = -127; q <= 127; ++q) {
      const float value = decode_signed(q, largest);
      // Subnormal numbers have fewer bits than the finest codes of very small blocks need.
      const bool exact = std::fabs(value) >= kSmallest || q == 0;
      PYCOMM_CHECK(!exact || first_code(value, first.factor) == q,
                   "code " + std::to_string(q) + " of " + text(largest));
      PYCOMM_CHECK(!exact || first_code(value, first.factor, kMiddle) == q,
                   "at random, code " + std::to_string(q) + " of " + text(largest));
      PYCOMM_CHECK(value > last || (!exact && value >= last), "codes must rise");
      last = value;
    }
    last = -1.0f;
    for (int q = 0; q <= 255; ++q) {
      const float value = decode_unsigned(q, largest);
      const bool exact = value >= kSmallest || q == 0;
      PYCOMM_CHECK(!exact || second_code(value, second.factor) == q,
                   "code " + std::to_string(q) + " of " + text(largest));
      PYCOMM_CHECK(!exact || second_code(value, second.factor, kMiddle) == q,
                   "at random, code " + std::to_string(q) + " of " + text(largest));
      PYCOMM_CHECK(value > last || (!exact && value >= last), "codes must rise");
      last = value;
    }
  }
}

// Whatever the roundings and the random bits, the largest magnitude gets one of the two largest codes,
// and what is as good as zero gets one of the two smallest.
void codes_stay_in_their_range() {
  std::mt19937 random(0);
  std::vector<float> magnitudes(std::begin(kMagnitudes), std::end(kMagnitudes));
  for (int i = 0; i < 1'000'000 / kEvery; ++i) {
    const auto bits = static_cast<std::uint32_t>(random() % 0x7f000000u + 0x00800000u);
    magnitudes.push_back(bit_cast<float>(bits));
  }
  for (const float largest : magnitudes) {
    const State8Scale first = scale_for(Role::first_moment, largest),
                      second = scale_for(Role::second_moment, largest);
    // The extremes, and any.
    for (const std::uint32_t dice : {0u, 0xffffffffu, static_cast<std::uint32_t>(random())}) {
      const std::int8_t plus = first_code(largest, first.factor, dice),
                        minus = first_code(-largest, first.factor, dice);
      PYCOMM_CHECK(plus >= 126 && minus <= -126 && minus >= -127, "first of " + text(largest));
      PYCOMM_CHECK(second_code(largest, second.factor, dice) >= 254, "second of " + text(largest));
      const float little = largest * 1e-12f;
      PYCOMM_CHECK(std::abs(first_code(little, first.factor, dice)) <= 1 &&
                       std::abs(first_code(-little, first.factor, dice)) <= 1 &&
                       second_code(largest * 1e-11f, second.factor, dice) <= 1,
                   "little beside " + text(largest));
    }
    PYCOMM_CHECK(first_code(largest, first.factor) == 127 &&
                     first_code(-largest, first.factor) == -127 &&
                     second_code(largest, second.factor) == 255,
                 "to nearest of " + text(largest));
  }
  for (const float zero : {0.0f, -0.0f}) {
    for (std::uint32_t dice = 0; dice < 0x10000u; ++dice) {
      PYCOMM_CHECK(first_code(zero, 1.0f, dice) == 0, "zero");
    }
  }
}

void scales() {
  for (const Role role : {Role::first_moment, Role::second_moment}) {
    for (const std::uint32_t bits : {0x7f800000u, 0x7fc00000u, 0x7fffffffu}) {
      const State8Scale scale = state8_scale(role, bits);
      PYCOMM_CHECK(std::isnan(scale.largest) && scale.factor == 0.0f, "not finite");
    }
    for (const std::uint32_t bits : {0u, 1u, 0x007fffffu}) {
      const State8Scale scale = state8_scale(role, bits);
      PYCOMM_CHECK(scale.largest == 0.0f && scale.factor == 0.0f, "subnormal");
    }
  }
}

// The error bounds of core/optim/state8.h, for fractions of a block's largest magnitude, of all
// sizes.
void errors_of_codes() {
  constexpr double kRounding = 1e-6;  // of the fp32 arithmetic
  for (const float largest : kMagnitudes) {
    const float first = scale_for(Role::first_moment, largest).factor,
                second = scale_for(Role::second_moment, largest).factor;
    const double most = largest, root = std::sqrt(most);
    for (std::int64_t bits = 0x20000000; bits <= 0x3f800000; bits += 997 * kEvery) {
      const float share = bit_cast<float>(static_cast<std::uint32_t>(bits)),
                  value = largest * share;
      const double y = std::sqrt(value / most), z = std::sqrt(y);
      for (const float either : {value, -value}) {
        const double off =
            decode_signed(first_code(either, first), largest) - static_cast<double>(either);
        PYCOMM_CHECK(std::fabs(off) <= most * (y / 127 + 1.0 / 64516) * (1 + kRounding) + 1.5e-45,
                     "first moment " + text(share) + " of " + text(largest));
        const double q = std::min(std::floor(y * 127), 126.0), sign = either < 0.0f ? -1.0 : 1.0;
        if (value < 1e-30f) continue;
        // The fraction lies in the low half of the bits; negative numbers take what is left of one.
        check_fair(either, sign * most * std::pow(q / 127, 2),
                   sign * most * std::pow((q + 1) / 127, 2), [&](std::uint32_t random) {
                     const std::uint32_t half = (either < 0.0f ? ~random : random) >> 16;
                     return decode_signed(first_code(either, first, half), largest);
                   });
      }
      const std::uint8_t code = second_code(value, second);
      const double off = std::sqrt(static_cast<double>(decode_unsigned(code, largest))) -
                         std::sqrt(static_cast<double>(value));
      const double bound = z < 1.0 / 255 ? 1.0 / 65025 : z / 255 + 1.0 / 260100;
      PYCOMM_CHECK(std::fabs(off) <= root * bound * (1 + kRounding) + 4e-23,
                   "second moment " + text(share) + " of " + text(largest));
      PYCOMM_CHECK(value == 0.0f || code > 0, "a second moment must not vanish");
      const double q = std::floor(z * 255);
      if (q < 1 || q > 254 || value < 1e-30f) continue;
      check_fair(value, most * std::pow(q / 255, 4), most * std::pow((q + 1) / 255, 4),
                 [&](std::uint32_t random) {
                   return decode_unsigned(second_code(value, second, random), largest);
                 });
    }
  }
}

// The mean of what a number may become is the number: over all fractions for first moments, over every
// 128th for second ones. This is finer than check_fair(): a 2^-14th of the distance of the neighbours.
void codes_keep_the_mean() {
  std::mt19937 random(0);
  constexpr std::uint32_t kFractions = 0x10000u;
  const float largest = 3.14159f;
  const float first = scale_for(Role::first_moment, largest).factor,
              second = scale_for(Role::second_moment, largest).factor;
  for (int i = 0; i < 300 / std::min<std::int64_t>(kEvery, 30); ++i) {
    const auto place = static_cast<float>(random() % 1'000'000) * 1e-6f;
    const float root = 1.0f + 253.0f * place;
    const float value = largest * root * root * root * root / 4228250625.0f;
    const float either = (i % 2 == 0 ? 1 : -1) * largest * place * place;
    double mean = 0, other = 0;
    for (std::uint32_t k = 0; k < kFractions; ++k) {
      mean += decode_signed(first_code(either, first, k), largest);
      other += decode_unsigned(second_code(value, second, k << 16 | 0x8000u), largest);
    }
    mean /= kFractions, other /= kFractions;
    const double q = std::floor(127 * place), n = std::floor(root);
    const double unit = largest * (2 * q + 1) / 16129;
    const double more = largest * (std::pow(n + 1, 4) - std::pow(n, 4)) / 4228250625.0;
    PYCOMM_CHECK(std::fabs(mean - either) <= unit * 0x1p-14, "mean of " + text(either));
    PYCOMM_CHECK(std::fabs(other - value) <= more * 0x1p-14, "mean of " + text(value));
  }
}

// Each multiplication doubles the relative error of its argument, so there are at most n roundings.
void powers() {
  for (const double base : {0.0, 0.4, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999}) {
    for (std::int64_t n = 0; n <= 10'000'000; n += 1 + n / 7) {
      const long double exact = std::pow(static_cast<long double>(base), n);
      const long double off = std::fabs(power(base, n) - exact);
      PYCOMM_CHECK(off <= exact * static_cast<long double>(n) * 0x1p-53L + 1e-300L,
                   text(base) + "^" + std::to_string(n));
    }
  }
}

// Also if weights are 1e44 times as large as their directions.
void lamb_stays_finite() {
  Settings settings;
  settings.lr = 1e-3, settings.eps = 1e-6;
  const Lamb lamb(settings, 1.0, 1e44);
  float p = 1e20f, m = 0.0f, v = 0.0f, unused = 0.0f;
  lamb(1e-30f, p, m, v, unused);
  PYCOMM_CHECK(std::isfinite(p) && p < 1e20f, "p = " + text(p));
}

// The error is at most a tree's roundings: six per level, for any length.
void sums() {
  Dice dice(0);
  for (const std::int64_t n : {0, 1, 31, 32, 33, 1023, 1024, 1025, 40'000, 1'048'577}) {
    std::vector<double> terms(static_cast<std::size_t>(n));
    long double exact = 0;
    for (double& term : terms) {
      term = std::ldexp(static_cast<double>(dice() % 1'000'003), static_cast<int>(dice() % 60));
      exact += term;
    }
    const double sum = sum_tree(terms.data(), n);
    const long double off = std::fabs(sum - exact);
    PYCOMM_CHECK(off <= exact * (32 + 5) * 3 * 0x1p-53L, "the sum of " + std::to_string(n));
  }
}

// Sums of squares are infinite or NaN if and only if an element is.
void sums_of_squares_tell_what_is_finite() {
  std::vector<float> values(cpu::kChunk, kLargest);
  const cpu::Numbers numbers{Storage::f32, Role::weight,
                             reinterpret_cast<std::byte*>(values.data()), nullptr, nullptr};
  PYCOMM_CHECK(std::isfinite(cpu::square_sum(numbers, 0, cpu::kChunk) * 1e18), "finite");
  for (const float bad : {std::numeric_limits<float>::infinity(), bit_cast<float>(0xffc00000u)}) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = bad;
      for (const std::int64_t n : {cpu::kChunk, static_cast<std::int64_t>(i) + 1}) {
        PYCOMM_CHECK(!std::isfinite(cpu::square_sum(numbers, 0, n)),
                     "element " + std::to_string(i) + " of " + std::to_string(n));
      }
      values[i] = kLargest;
    }
  }
}

// A float some units of its last place further.
float moved(float value, int units) {
  return bit_cast<float>(bit_cast<std::uint32_t>(value) + static_cast<std::uint32_t>(units));
}

// What GPUs compute in place of sqrt() and division. Nearly all inverses may be a unit off.
void moderate_numbers_round_as_all_numbers() {
  std::mt19937 random(0);
  const auto between = [&](float least, float most) {
    const auto first = bit_cast<std::uint32_t>(least), last = bit_cast<std::uint32_t>(most);
    return bit_cast<float>(std::uniform_int_distribution<std::uint32_t>(first, last)(random));
  };
  for (int i = 0; i < 2'000'000 / kEvery; ++i) {
    const float x = between(kLeastRooted, kLargest);
    const auto inverse = static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
    PYCOMM_CHECK(refined_root(x, inverse) == std::sqrt(x), "root of " + text(x));
    const float dividend = between(kLeastDividend, kMostDividend);
    const float divisor = between(kLeastDivisor, kMostDivisor);
    for (int units = -1; units <= 1; ++units) {
      PYCOMM_CHECK(
          refined_quotient(dividend, divisor, moved(1.0f / divisor, units)) == dividend / divisor,
          text(dividend) + " / " + text(divisor));
    }
  }
  // The pairs for which an inverse must not be off.
  for (const auto& [dividend, divisor] :
       {std::pair{0x1p0f, 0x1.fffffep0f}, std::pair{0x1.aaaaa6p0f, 0x1.fffffap0f}}) {
    PYCOMM_CHECK(refined_quotient(dividend, divisor, 1.0f / divisor) == dividend / divisor,
                 text(dividend) + " / " + text(divisor));
  }
}

void moderate_numbers_are_told_apart() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto lie_between = [](float low, const float (&values)[3], float high) {
    return Magnitudes(values).are_between(low, high);
  };
  for (const float good : {2.0f, -2.0f, 3.0f, -5.0f}) {
    PYCOMM_CHECK(lie_between(2.0f, {3.0f, good, 4.0f}, 5.0f), "between");
  }
  for (const float bad : {0.0f, -0.0f, 1e-40f, moved(2.0f, -1), moved(5.0f, 1), -6.0f, infinity,
                          -infinity, nan, -nan}) {
    PYCOMM_CHECK(!lie_between(2.0f, {bad, 3.0f, 4.0f}, 5.0f), "first: " + text(bad));
    PYCOMM_CHECK(!lie_between(2.0f, {3.0f, 4.0f, bad}, 5.0f), "last: " + text(bad));
    const float squares[] = {3.0f, bad, 4.0f};
    PYCOMM_CHECK(!Magnitudes::of_squares(squares).are_between(2.0f, 5.0f), "square: " + text(bad));
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"every number survives the split", every_number_survives_the_split},
      {"no finite number becomes NaN", no_finite_number_becomes_nan},
      {"roots in half", roots_in_half},
      {"halves at random", halves_at_random},
      {"roles are independent", roles_are_independent},
      {"codes are fixed points", codes_are_fixed_points},
      {"codes stay in their range", codes_stay_in_their_range},
      {"codes keep the mean", codes_keep_the_mean},
      {"scales", scales},
      {"errors of codes", errors_of_codes},
      {"moderate numbers round as all numbers", moderate_numbers_round_as_all_numbers},
      {"moderate numbers are told apart", moderate_numbers_are_told_apart},
      {"powers", powers},
      {"LAMB stays finite", lamb_stays_finite},
      {"sums", sums},
      {"sums of squares tell what is finite", sums_of_squares_tell_what_is_finite},
  });
}

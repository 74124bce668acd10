// Index arithmetic (parts, tiles, the double tree) and conversions of all 16-bit floats.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/layout.h"
#include "core/reduce.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

void parts_cover() {
  for (const std::int64_t count : {0, 1, 15, 16, 17, 100, 4096, 4097}) {
    for (int parts = 1; parts <= 9; ++parts) {
      std::int64_t end = 0, longest = 0, shortest = count + 1;
      for (int i = 0; i < parts; ++i) {
        const Range part = part_of(count, parts, i, 16);
        PYCOMM_CHECK(part.begin == end && part.count >= 0, "parts must follow each other");
        PYCOMM_CHECK(part.begin % 16 == 0 || part.begin == count, "parts begin at whole lines");
        end = part.begin + part.count;
        longest = std::max(longest, part.count);
        shortest = std::min(shortest, part.count);
      }
      PYCOMM_CHECK(end == count, "parts must cover everything");
      PYCOMM_CHECK(longest - shortest < 32, "parts must be even");
      PYCOMM_CHECK(part_of(count, parts, 0, 16).count == longest,
                   "the first part is a longest one");
    }
  }
}

int depth_of(int tree, int rank, int n) {
  int depth = 0;
  for (int v = rank; tree_node(tree, v, n).parent >= 0; ++depth) {
    v = tree_node(tree, v, n).parent;
    PYCOMM_CHECK(depth <= n, "a tree must not have a circle");
  }
  return depth;
}

void trees_span() {
  for (int n = 1; n <= 130; ++n) {
    std::set<int> inner;
    for (int tree = 0; tree < 2; ++tree) {
      int roots = 0, edges = 0, deepest = 0;
      for (int r = 0; r < n; ++r) {
        const TreeNode node = tree_node(tree, r, n);
        roots += node.parent < 0 ? 1 : 0;
        for (const int child : {node.left, node.right}) {
          if (child < 0) continue;
          ++edges;
          PYCOMM_CHECK(tree_node(tree, child, n).parent == r, "a child must know its parent");
        }
        if (node.left >= 0 || node.right >= 0) {
          PYCOMM_CHECK(inner.insert(r).second, "no rank is an inner node of both trees");
        }
        deepest = std::max(deepest, depth_of(tree, r, n));
      }
      PYCOMM_CHECK(roots == 1 && edges == n - 1, "a tree has one root and spans all ranks");
      PYCOMM_CHECK(deepest == tree_depth(n), "tree_depth must be the depth");
    }
  }
}

// Independent of the code under test: computes the number that the bits represent.
double value_of_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

void halves_convert() {
  for (int i = 0; i < 1 << 16; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float wide = half_to_float(bits);
    const bool special = (bits & 0x7c00) == 0x7c00;
    if (!special) {
      PYCOMM_CHECK(wide == value_of_half(bits), "half_to_float must be exact");
      PYCOMM_CHECK(std::signbit(wide) == ((bits & 0x8000) != 0),
                   "half_to_float must keep the sign");
      PYCOMM_CHECK(float_to_half(wide) == bits, "float_to_half must invert half_to_float");
    } else if ((bits & 0x3ff) == 0) {
      PYCOMM_CHECK(std::isinf(wide) && float_to_half(wide) == bits, "infinities must survive");
    } else {
      PYCOMM_CHECK(std::isnan(wide) && float_to_half(wide) == 0x7e00, "NaN must become canonical");
    }
  }
  // Rounding to nearest even: halfway between two neighbours, and just beside it.
  for (int i = 0; i < 0x7bff; ++i) {
    const auto low = static_cast<std::uint16_t>(i), high = static_cast<std::uint16_t>(i + 1);
    const auto middle = static_cast<float>((value_of_half(low) + value_of_half(high)) / 2);
    PYCOMM_CHECK(float_to_half(middle) == (low % 2 == 0 ? low : high), "ties go to even");
    PYCOMM_CHECK(float_to_half(std::nextafter(middle, 0.0f)) == low, "below the middle goes down");
    PYCOMM_CHECK(float_to_half(std::nextafter(middle, 1e9f)) == high, "above the middle goes up");
  }
  PYCOMM_CHECK(float_to_half(65520.0f) == 0x7c00, "too large becomes infinity");
}

void bfloat16s_convert() {
  for (int i = 0; i < 1 << 16; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float wide = bfloat16_to_float(bits);
    const std::uint16_t back = float_to_bfloat16(wide);
    PYCOMM_CHECK(std::isnan(wide) ? back == 0x7fc0 : back == bits, "bfloat16 must survive");
    if (std::isnan(wide) || std::isinf(wide)) continue;
    const float tie = bit_cast<float>(static_cast<std::uint32_t>(bits) << 16 | 0x8000u);
    const auto up = static_cast<std::uint16_t>(bits + 1);
    PYCOMM_CHECK(float_to_bfloat16(tie) == (bits % 2 == 0 ? bits : up), "ties go to even");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({{"parts cover", parts_cover},
                  {"trees span", trees_span},
                  {"halves convert", halves_convert},
                  {"bfloat16s convert", bfloat16s_convert}});
}

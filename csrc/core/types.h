// What all of pycomm shares: the host/device macro, checks that throw with file and line, and the
// element types. Does not depend on torch, CUDA or the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>

// For functions that both the host compiler and nvcc compile, such as element functions and
// algorithms. They are always inlined, so that code compiled for one instruction set is never
// called where another is expected.
#if defined(__CUDACC__)
#define PYCOMM_HD __host__ __device__ __forceinline__
#else
#define PYCOMM_HD inline __attribute__((always_inline))
#endif

// In a branch that is rarely taken: keeps a GPU's compiler from running its body always, and then
// selecting.
PYCOMM_HD void stay_a_branch() {
#if defined(__CUDA_ARCH__)
  asm volatile("");
#endif
}

// Compiles a function once per x86-64 level; the loader selects one copy. Programs with such
// functions crash at start under GCC 12's ThreadSanitizer. Other compilers and processors get a
// single copy.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define PYCOMM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PYCOMM_CLONES
#endif

// For a function: allows the compiler to fuse a product and a sum into one multiply-add. Clang does
// not know the attribute.
#if defined(__clang__)
#define PYCOMM_CONTRACT
#else
#define PYCOMM_CONTRACT __attribute__((optimize("fp-contract=fast")))
#endif

// For a loop whose iterations are independent although its pointers may alias. If an iteration
// takes the address of its variables, `omp simd` would use narrower vectors.
#if defined(__clang__)
#define PYCOMM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYCOMM_INDEPENDENT _Pragma("GCC ivdep")
#endif

// For a loop: always vectorise it. nvcc does not know the pragma.
#if defined(__CUDACC__)
#define PYCOMM_SIMD
#else
#define PYCOMM_SIMD _Pragma("omp simd")
#endif

// Throws std::invalid_argument (ValueError in Python) unless `condition` holds. Messages are for
// users: they name arguments, not places in the source.
#define PYCOMM_CHECK(condition, message)                                 \
  do {                                                                   \
    if (!(condition)) throw std::invalid_argument(std::string(message)); \
  } while (false)

namespace pycomm {

// The names of an enum's values, in order: `all`. Specialised next to each enum. Error messages,
// parsers, validity checks and the tables that Python sees use it.
template <class Enum>
struct Names;

template <class Enum>
inline constexpr int kCountOf = static_cast<int>(std::size(Names<Enum>::all));

// True if a value, possibly from another process, is one of the enum's.
template <class Enum>
PYCOMM_HD constexpr bool is_known(Enum value) {
  return static_cast<int>(value) < kCountOf<Enum>;
}

template <class Enum>
constexpr const char* name_of(Enum value) {
  return is_known(value) ? Names<Enum>::all[static_cast<std::size_t>(value)] : "unknown";
}

// The enum's value named `text`. Throws std::invalid_argument that names the argument and lists the
// allowed values.
template <class Enum>
Enum parse(const std::string& text, const char* argument) {
  std::string allowed;
  for (int i = 0; i < kCountOf<Enum>; ++i) {
    if (text == Names<Enum>::all[i]) return static_cast<Enum>(i);
    allowed += std::string(i == 0 ? "" : ", ") + Names<Enum>::all[i];
  }
  PYCOMM_CHECK(false,
               std::string(argument) + " must be one of " + allowed + ", got '" + text + "'");
}

// A list of types, selected at run time by index.
template <class First, class... Rest>
struct TypeList {
  static constexpr int kCount = 1 + sizeof...(Rest);

  // The size of the type at an index; 0 beyond the end.
  PYCOMM_HD static constexpr std::int64_t size_at(int index) {
    int i = 1;
    std::int64_t size = index == 0 ? sizeof(First) : 0;
    ((i++ == index ? size = sizeof(Rest) : 0), ...);
    return size;
  }
  // Calls visitor(std::type_identity<T>{}) with the type at an index, which must be in the list.
  template <class Visit>
  PYCOMM_HD static auto visit(int index, const Visit& visitor) {
    if constexpr (sizeof...(Rest) > 0) {
      if (index > 0) return TypeList<Rest...>::visit(index - 1, visitor);
    }
    return visitor(std::type_identity<First>{});
  }
};

// Bitwise reductions do not depend on the width of an element, so they are there for u8 only
// (core/elements.h).
enum class ReduceOp : std::uint8_t { sum, avg, min, max, prod, band, bor, bxor };
template <>
struct Names<ReduceOp> {
  static constexpr const char* all[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};
};

// 16-bit floats are stored as their bits; core/reduce.h converts them.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The element types of the arithmetic, named as in torch. core/elements.h maps all other types to
// them.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8, i16, i8 };
template <>
struct Names<DType> {
  static constexpr const char* all[] = {"float64", "float32", "float16", "bfloat16", "int64",
                                        "int32",   "uint8",   "int16",   "int8"};
};

// What elements are in memory, in the order of DType.
using ElementTypes = TypeList<double, float, Half, BFloat16, std::int64_t, std::int32_t,
                              std::uint8_t, std::int16_t, std::int8_t>;
static_assert(ElementTypes::kCount == kCountOf<DType>);

PYCOMM_HD constexpr std::int64_t size_of(DType dtype) {
  return ElementTypes::size_at(static_cast<int>(dtype));
}

// Calls visit(T{}) with the C++ type of `dtype`.
template <class Visitor>
auto visit_dtype(DType dtype, Visitor&& visit) {
  return ElementTypes::visit(static_cast<int>(dtype),
                             [&](auto type) { return visit(typename decltype(type)::type{}); });
}

}  // namespace pycomm

// What every part of pycomm shares: the host/device macro, checks that throw with file and line,
// and the element types. Includes nothing of torch, CUDA or the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>

// Element functions and algorithms are compiled by the host compiler and by nvcc alike. They are
// always inlined, so that a function compiled for one instruction set never serves another.
#if defined(__CUDACC__)
#define PYCOMM_HD __host__ __device__ __forceinline__
#else
#define PYCOMM_HD inline __attribute__((always_inline))
#endif

// One copy of a loop per level of x86-64, chosen when the library is loaded. GCC 12's
// ThreadSanitizer crashes on them at start; other compilers and processors have one copy.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define PYCOMM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PYCOMM_CLONES
#endif

// On a function: a product and a sum may become one fused multiply-add. Clang does not know it.
#if defined(__clang__)
#define PYCOMM_CONTRACT
#else
#define PYCOMM_CONTRACT __attribute__((optimize("fp-contract=fast")))
#endif

// Before a loop whose iterations do not depend on each other, though its pointers might alias. Where
// iterations have variables whose address is taken, `omp simd` would settle for narrower vectors.
#if defined(__clang__)
#define PYCOMM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PYCOMM_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Before a loop: vectorise it, whatever it looks like. nvcc does not know the pragma.
#if defined(__CUDACC__)
#define PYCOMM_SIMD
#else
#define PYCOMM_SIMD _Pragma("omp simd")
#endif

#define PYCOMM_STRINGIZE_(x) #x
#define PYCOMM_STRINGIZE(x) PYCOMM_STRINGIZE_(x)
#define PYCOMM_WHERE " [" __FILE__ ":" PYCOMM_STRINGIZE(__LINE__) "]"

// Throws std::invalid_argument (ValueError in Python) unless `condition` holds.
#define PYCOMM_CHECK(condition, message)                                \
  do {                                                                  \
    if (!(condition)) {                                                 \
      throw std::invalid_argument(std::string(message) + PYCOMM_WHERE); \
    }                                                                   \
  } while (false)

namespace pycomm {

// The names of an enum's values, in their order: `all`. Specialised beside the enum. Messages,
// parsers, checks of what other processes send and the tables that Python sees come from it.
template <class Enum>
struct Names;

template <class Enum>
inline constexpr int kCountOf = static_cast<int>(std::size(Names<Enum>::all));

// Whether a value, which may come from another process, is one of the enum's.
template <class Enum>
PYCOMM_HD constexpr bool is_known(Enum value) {
  return static_cast<int>(value) < kCountOf<Enum>;
}

template <class Enum>
constexpr const char* name_of(Enum value) {
  return is_known(value) ? Names<Enum>::all[static_cast<std::size_t>(value)] : "unknown";
}

// Throws std::invalid_argument that names the argument and what is allowed.
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

// Types that a number tells apart.
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
  // Calls visit(std::type_identity<T>{}) with the type at an index, which must be in the list.
  template <class Visit>
  PYCOMM_HD static auto visit(int index, const Visit& visitor) {
    if constexpr (sizeof...(Rest) > 0) {
      if (index > 0) return TypeList<Rest...>::visit(index - 1, visitor);
    }
    return visitor(std::type_identity<First>{});
  }
};

enum class ReduceOp : std::uint8_t { sum, avg, min, max, prod };
template <>
struct Names<ReduceOp> {
  static constexpr const char* all[] = {"sum", "avg", "min", "max", "prod"};
};

// 16-bit floats are carried as bits; core/reduce.h converts them.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// The element types, by torch's names. bind/dtypes.h tells them from torch's and DLPack's.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8 };
template <>
struct Names<DType> {
  static constexpr const char* all[] = {"float64", "float32", "float16", "bfloat16",
                                        "int64",   "int32",   "uint8"};
};

// What elements are in memory, in the order of DType.
using ElementTypes =
    TypeList<double, float, Half, BFloat16, std::int64_t, std::int32_t, std::uint8_t>;
static_assert(ElementTypes::kCount == kCountOf<DType>);

PYCOMM_HD constexpr std::int64_t size_of(DType dtype) {
  return ElementTypes::size_at(static_cast<int>(dtype));
}

// Calls visit(T{}) with the element type that `dtype` names.
template <class Visitor>
auto visit_dtype(DType dtype, Visitor&& visit) {
  return ElementTypes::visit(static_cast<int>(dtype),
                             [&](auto type) { return visit(typename decltype(type)::type{}); });
}

}  // namespace pycomm

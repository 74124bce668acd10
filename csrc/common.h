// What every part of pycomm shares: the host/device macro, checks that throw with file and line,
// and the element types. Includes nothing of torch, CUDA or the operating system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

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

enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, u8 };
inline constexpr int kDTypes = 7;

enum class ReduceOp : std::uint8_t { sum, avg, min, max, prod };
inline constexpr int kReduceOps = 5;

// 16-bit floats are carried as bits; core/reduce.h converts them.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

PYCOMM_HD constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

// The name of an enumerator that may come from another process.
template <class Enum, std::size_t N>
constexpr const char* name_in(const char* const (&names)[N], Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return index < N ? names[index] : "unknown";
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float64", "float32", "float16", "bfloat16",
                                   "int64",   "int32",   "uint8"};
  return name_in(names, dtype);
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* names[] = {"sum", "avg", "min", "max", "prod"};
  return name_in(names, op);
}

// Calls visit(T{}) with the element type that `dtype` names.
template <class Visitor>
auto visit_dtype(DType dtype, Visitor&& visit) {
  switch (dtype) {
    case DType::f64:
      return visit(double{});
    case DType::f32:
      return visit(float{});
    case DType::f16:
      return visit(Half{});
    case DType::bf16:
      return visit(BFloat16{});
    case DType::i64:
      return visit(std::int64_t{});
    case DType::i32:
      return visit(std::int32_t{});
    case DType::u8:
      break;
  }
  return visit(std::uint8_t{});
}

}  // namespace pycomm

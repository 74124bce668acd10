// Included before the kernels by `cuda_check.py --part`: of the element types, the algorithms get float,
// whose machine code `make sass` reads, and a fifth of the others.
#pragma once

#include <type_traits>

#include "core/types.h"

namespace pycomm {

template <class List>
struct SomeOf;

template <class... Types>
struct SomeOf<TypeList<Types...>> {
  template <class Visitor>
  static void visit(int wanted, const Visitor& visit) {
    visit_from<0, Types...>(wanted, visit);
  }

  template <int index, class T, class... Rest, class Visitor>
  static void visit_from(int wanted, const Visitor& visit) {
    if constexpr (index % 5 == PYCOMM_PART || std::is_same_v<T, float>) {
      if (index == wanted) visit(T{});
    }
    if constexpr (sizeof...(Rest) > 0) visit_from<index + 1, Rest...>(wanted, visit);
  }
};

template <class Visitor>
void visit_some_dtypes(DType dtype, const Visitor& visit) {
  SomeOf<ElementTypes>::visit(static_cast<int>(dtype), visit);
}

}  // namespace pycomm

#define visit_dtype visit_some_dtypes

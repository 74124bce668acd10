// A torch tensor seen through DLPack's C exchange: pointer and type in well under 100 ns, without
// touching torch's C++ ABI.
#pragma once

#include <pybind11/pybind11.h>

#include "common.h"

namespace pycomm::bind {

struct TensorView {
  void* data;
  DType dtype;
  std::int64_t count;
};

// Fills `view` for a plain case: a dense, contiguous CPU tensor of a supported type that needs no
// gradient. Otherwise false, with no Python error set; the caller then looks at the tensor in Python.
bool view_plain_tensor(PyObject* object, TensorView& view);

}  // namespace pycomm::bind

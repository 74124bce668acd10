// Ordinary tensors as C++ reads them, without a function of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "core/elements.h"

namespace pycomm::bind {

// The memory of a dense, contiguous CPU tensor. Valid as long as the tensor keeps its memory and shape.
struct DenseTensor {
  void* data = nullptr;
  Element element = Element::u8;
  std::int64_t count = 0;
  int dims = 0;
  const std::int64_t* shape = nullptr;
};

// Takes the reader that is compiled for the torch that runs, in a capsule; None: there is none.
void set_tensor_reader(const pybind11::object& capsule);

// True if a profiler or a dispatch mode of torch wants to see what this thread calls.
bool calls_are_watched();

// False, without an error, unless the object is a dense, contiguous CPU tensor of a supported type and
// of torch's own class, for which autograd records nothing. Such a tensor does not overlap itself.
bool view_dense_tensor(PyObject* object, DenseTensor& view);

// Tells autograd, which may have saved the tensor, that its content changes. False with an error if
// that is not allowed.
bool increment_version(PyObject* tensor);

}  // namespace pycomm::bind

// Reads ordinary tensors in C++, without calling Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "core/elements.h"
#include "core/tensor_reader.h"

namespace pycomm::bind {

// Keeps a tensor's memory alive, even if the tensor gets other memory. Destroy it with the GIL
// held.
class Keeper {
 public:
  Keeper() = default;
  explicit Keeper(void* memory) : memory_(memory) {}
  Keeper(Keeper&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  Keeper& operator=(Keeper&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Keeper();

  explicit operator bool() const { return memory_ != nullptr; }
  // Hands the memory over to a Python object.
  pybind11::object into_object() &&;

 private:
  void* memory_ = nullptr;
};

inline constexpr int kOnHost = -1;

// A dense, contiguous tensor.
struct DenseTensor {
  void* data = nullptr;
  int device = kOnHost;  // or the index of a CUDA device
  Element element = Element::u8;
  std::int64_t count = 0;
  int dims = 0;
  const std::int64_t* shape = nullptr;  // valid until Python runs
  Keeper keeper;
};

// True if a profiler, a dispatch mode or a function transform of torch wants to see this thread's
// calls.
bool calls_are_watched();

// True if autograd runs a backward on this thread.
bool in_backward();

// False, without an error, unless the object is a dense, contiguous tensor of a supported type and of
// torch's own class, on the CPU or on CUDA, for which autograd records nothing. Such a tensor does not
// overlap itself.
bool view_tensor(PyObject* object, DenseTensor& view);
// The same, only on the CPU.
bool view_dense_tensor(PyObject* object, DenseTensor& view);

// Tells autograd, which may have saved the tensor, that its content changes. False with an error if
// that is not allowed.
bool increment_version(PyObject* tensor);

// Describes any strided tensor with its own memory on the CPU or on CUDA; false, without an error, for
// other objects.
bool describe(PyObject* object, TensorDescription& description);

// The same for a tensor's gradient. `memory` is empty if there is none.
bool describe_grad(PyObject* tensor, TensorDescription& description, Keeper& memory);

// True if record_stream() can be called.
bool records_streams();

// Tells the allocator that the current stream of a CUDA tensor's device uses its memory. False with an
// error if that fails.
bool record_stream(PyObject* tensor, std::uintptr_t& stream);

}  // namespace pycomm::bind

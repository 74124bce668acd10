// What pycomm._C gets from the module that is compiled for the torch that runs (csrc/c10d): torch's
// own C++ calls for an ordinary tensor, which take a tenth of the time of those through Python.
#pragma once

#include <cstdint>

struct _object;  // PyObject

namespace pycomm {

// Where a tensor's elements lie, and how. Pointers are valid until the tensor changes.
struct TensorDescription {
  const void* data = nullptr;
  const std::int64_t* shape = nullptr;
  const std::int64_t* strides = nullptr;
  std::int64_t version = 0;  // counts writes; -1 if torch does not count them
  std::int32_t dims = 0;
  std::int16_t device = 0;  // the index of a CUDA device, or -1 for the CPU
  std::int8_t type = 0;     // a ScalarType
  bool negated = false;     // the elements' signs are to be flipped
};

struct TensorReader {
  // True if a profiler, a dispatch mode or a function transform of torch wants to see what this thread
  // calls.
  bool (*watched)();
  // Fills `view`, a DLTensor of DLPack, and returns what keeps its memory, although the tensor may get
  // another one, until release(). `tensor` is of the class torch.Tensor itself. Null without an error if
  // it requires grad, carries a tangent, is a negated view, or has no memory that DLPack can tell of.
  void* (*view)(_object* tensor, void* view);
  void (*release)(void* memory);
  // Tells autograd, which may have saved the tensor, that its content changes. False with an error if
  // that is not allowed.
  bool (*increment_version)(_object* tensor);
  // Tells the allocator that the current stream of a CUDA tensor's device uses its memory. False with an
  // error if that fails. Null if only Python can do it.
  bool (*record_stream)(_object* tensor, std::uintptr_t& stream);
  // Describes a tensor. False without an error for what is not a strided tensor with its own memory on
  // the CPU or on CUDA. `tensor` is of the class torch.Tensor or of one that inherits from it.
  bool (*describe)(_object* tensor, TensorDescription& description);
  // The same for the gradient of a tensor. `memory` keeps the gradient's memory until release(); null if
  // there is no gradient.
  bool (*describe_grad)(_object* tensor, TensorDescription& description, void*& memory);
};

inline constexpr const char* kTensorReaderName = "pycomm.tensor_reader";

}  // namespace pycomm

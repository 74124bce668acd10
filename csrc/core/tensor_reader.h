// What pycomm._C gets from the module that is compiled for the torch that runs (csrc/c10d): torch's
// own C++ calls for an ordinary tensor, which take a tenth of the time of those through Python.
#pragma once

#include <cstdint>

struct _object;  // PyObject

namespace pycomm {

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
};

inline constexpr const char* kTensorReaderName = "pycomm.tensor_reader";

}  // namespace pycomm

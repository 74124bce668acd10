// torch's operations on the emulated device: the CPU's kernels run them, on aliases of their tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/set_native.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/group.h"
#include "device.h"

namespace emulator {
namespace {

at::Tensor made_of(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

c10::Storage new_storage(const void* from, std::size_t bytes) {
  c10::DataPtr data = memory.allocate(bytes);
  if (bytes > 0) std::memcpy(data.get(), from, bytes);
  return {c10::Storage::use_byte_size_t(), bytes, std::move(data), &memory, true};
}

// The work that has begun on the current stream reads or writes a tensor.
void note_access(const at::Tensor& tensor, const c10::Stream& stream, bool writes,
                 const std::string& work) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) return;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  const std::int64_t begin = tensor.storage_offset() * bytes;
  order.access(tensor.storage().data(), begin, begin + (last + 1) * bytes, line_of(stream), writes,
               work);
}

// The tensors of a call on this device, and the CPU's aliases that take their places.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (const auto& [original, alias] : pairs_) {
      if (original.is_same(tensor)) return alias;
    }
    const c10::Storage& storage = tensor.storage();
    c10::Storage host;
    for (const auto& [original, alias] : pairs_) {  // tensors may overlap
      if (original.storage().is_alias_of(storage)) host = alias.storage();
    }
    if (!host) {
      host = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                          c10::DataPtr(storage.mutable_data(), c10::kCPU),
                          c10::GetAllocator(c10::kCPU), true);
    }
    pairs_.emplace_back(tensor, made_of(std::move(host), c10::DispatchKey::CPU, tensor));
    return pairs_.back().second;
  }

  // What a result is on this device.
  at::Tensor result(const at::Tensor& made) {
    if (!made.defined() || !made.is_cpu()) return made;
    for (const auto& [original, alias] : pairs_) {
      if (alias.is_same(made)) return original;
    }
    for (const auto& [original, alias] : pairs_) {
      if (alias.storage().is_alias_of(made.storage())) {
        return made_of(original.storage(), c10::DispatchKey::CUDA, made);
      }
    }
    const c10::Storage& storage = made.storage();
    at::Tensor copy =
        made_of(new_storage(storage.data(), storage.nbytes()), c10::DispatchKey::CUDA, made);
    note_access(copy, current_stream(), true, "making a result");
    return copy;
  }

  // Operations may have resized their arguments.
  void update_originals() {
    for (auto& [original, alias] : pairs_) {
      c10::StorageImpl* const to = original.storage().unsafeGetStorageImpl();
      const c10::Storage& from = alias.storage();
      if (from.data() != to->data()) {
        to->set_data_ptr_noswap(new_storage(from.data(), from.nbytes()).set_data_ptr({}));
        to->set_nbytes(from.nbytes());
      }
      if (original.sizes() != alias.sizes() || original.strides() != alias.strides()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                              alias.storage_offset());
      }
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// Replaces the tensors of a value by change(tensor).
template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// True for what makes the host wait for a stream: the value of a tensor, and copies that do not say otherwise.
bool waits(const c10::OperatorHandle& op, const c10::Stack& stack) {
  if (op.schema().name() == "aten::_local_scalar_dense") return true;
  if (op.schema().name() != "aten::copy_") return false;
  const auto copy = torch::jit::last(stack, 3);
  return !copy[2].toBool() && copy[0].toTensor().is_cuda() != copy[1].toTensor().is_cuda();
}

// Views read nothing: their schema says that a result is an argument's alias.
void note_accesses(const c10::OperatorHandle& op, const c10::Stack& stack,
                   const c10::Stream& stream) {
  order.begin(line_of(stream));
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias != nullptr && !alias->isWrite()) continue;
    changed(stack[stack.size() - arguments.size() + i], [&](const at::Tensor& tensor) {
      note_access(tensor, stream, alias != nullptr, op.schema().name());
      return tensor;
    });
  }
}

void run_on_host(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::Stream stream = current_stream();
  const bool host_waits = waits(op, *stack);
  if (host_waits) wait();
  note_accesses(op, *stack, stream);
  const std::size_t arguments = op.schema().arguments().size();
  Aliases aliases;
  for (std::size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& t) { return aliases.of(t); });
  }
  {
    const at::AutoDispatchBelowAutograd below;
    op.callBoxed(stack);
  }
  aliases.update_originals();
  const std::size_t results = op.schema().returns().size();
  for (std::size_t i = stack->size() - results; i < stack->size(); ++i) {
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& t) { return aliases.result(t); });
  }
  if (host_waits) order.host_waits(line_of(stream));
}

// The arguments that an operation writes to are its results.
void push_written(const c10::OperatorHandle& op, const c10::Stack& arguments, c10::Stack* stack) {
  for (const c10::Argument& result : op.schema().returns()) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* const written = op.schema().arguments()[i].alias_info();
      if (written != nullptr && result.alias_info() != nullptr &&
          *written == *result.alias_info()) {
        stack->push_back(arguments[i]);
      }
    }
  }
}

// The current streams of the devices that an operation's tensors are on.
std::vector<c10::Stream> streams_of(const c10::OperatorHandle& op, const c10::Stack& stack) {
  std::vector<c10::Stream> found;
  for (const c10::IValue& value : torch::jit::last(stack, op.schema().arguments().size())) {
    changed(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      const c10::Stream stream = current_stream(tensor.device());
      if (std::find(found.begin(), found.end(), stream) == found.end()) found.push_back(stream);
      return tensor;
    });
  }
  return found;
}

// Runs an operation on the stream of its first tensor's device. As in torch's copies between devices, the streams of
// all devices wait for each other.
void run_on_streams(const c10::OperatorHandle& op, c10::Stack* stack) {
  const std::vector<c10::Stream> streams = streams_of(op, *stack);
  c10::OptionalDeviceGuard guard;
  if (!streams.empty()) guard.reset_device(streams.front().device());
  for (const c10::Stream& other : streams) order.follow(line_of(streams.front()), line_of(other));
  run_on_host(op, stack);
  for (const c10::Stream& other : streams) order.follow(line_of(other), line_of(streams.front()));
}

// While the current stream is captured, every replay runs the operation; results that are new tensors are made now, and
// each replay copies into them.
void run_on_stream(const c10::OperatorHandle& op, c10::Stack* stack) {
  const c10::Stream stream = current_stream();
  if (!is_captured(stream)) return run_on_streams(op, stack);
  TORCH_CHECK(!waits(op, *stack), "a captured stream cannot be waited for");
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  c10::Stack results;
  if (op.schema().is_mutable()) {
    torch::jit::drop(*stack, arguments.size());
    push_written(op, arguments, stack);
  } else {
    run_on_host(op, stack);
    results = torch::jit::last(*stack, op.schema().returns().size()).vec();
  }
  device::enqueue(native(stream), [op, arguments, results] {
    const at::AutoDispatchBelowADInplaceOrView below;
    c10::Stack again = arguments;
    run_on_host(op, &again);
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (results[i].isTensor() && results[i].toTensor().defined())
        results[i].toTensor().copy_(again[i].toTensor());
    }
  });
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kCUDA)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kCUDA)));
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  order.recorded(tensor.storage().data(), line_of(stream));
}

// A kernel that is about to be enqueued on the current stream reads or writes a tensor.
void kernel_uses(const at::Tensor& tensor, bool writes) {
  const c10::Stream stream = current_stream(tensor.device());
  if (is_captured(stream)) return;
  order.begin(line_of(stream));
  note_access(tensor, stream, writes, "a kernel");
}

// The kernel of an operation that is about to be enqueued reads or writes what is at an address.
void operation_uses(const void* data, std::uintptr_t stream, bool writes) {
  const auto address = reinterpret_cast<std::int64_t>(data);
  const int device = order.device_at(address);
  if (device < 0) return;
  const c10::Device of(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  const c10::Stream line(c10::Stream::UNSAFE, of, static_cast<c10::StreamId>(stream));
  if (is_captured(line)) return;
  order.begin(line_of(line));
  order.access_at(address, line_of(line), writes, "a kernel");
}

// The stream of a call of the runtime; null is the default one.
c10::Stream stream_of(cudaStream_t stream) {
  const c10::Device here(c10::kCUDA, static_cast<c10::DeviceIndex>(device::current_device()));
  return c10::Stream(c10::Stream::UNSAFE, here, reinterpret_cast<c10::StreamId>(stream));
}

// A tensor over memory that is there.
at::Tensor bytes_at(std::int64_t address, std::int64_t bytes, at::Device device) {
  order.allocated(reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes),
                  line_of(current_stream(device)));
  return at::for_blob(reinterpret_cast<void*>(address), {bytes})
      .options(at::TensorOptions(device).dtype(at::kByte))
      .target_device(device)
      .make_tensor();
}

}  // namespace

// The linker puts the second of these in the place of pycomm::cuda::Group::run(call, stream, sharding),
// and calls that the first.
using pycomm::Call, pycomm::cuda::Sharding;
namespace cuda = pycomm::cuda;

extern "C" void __real__ZN6pycomm4cuda5Group3runERKNS_4CallEmRKNS0_8ShardingE(cuda::Group*,
                                                                              const Call&,
                                                                              std::uintptr_t,
                                                                              const Sharding&);
extern "C" void __wrap__ZN6pycomm4cuda5Group3runERKNS_4CallEmRKNS0_8ShardingE(
    cuda::Group* group, const Call& call, std::uintptr_t stream, const Sharding& sharding) {
  operation_uses(call.input, stream, false);
  operation_uses(call.output, stream, true);
  __real__ZN6pycomm4cuda5Group3runERKNS_4CallEmRKNS0_8ShardingE(group, call, stream, sharding);
}

// In the same way, what pycomm does by CUDA's runtime itself: copies and events.
extern "C" cudaError_t __real__Z15cudaMemcpyAsyncPvPKvmiP6Stream(void*, const void*, std::size_t,
                                                                 int, cudaStream_t);
extern "C" cudaError_t __wrap__Z15cudaMemcpyAsyncPvPKvmiP6Stream(void* to, const void* from,
                                                                 std::size_t bytes, int kind,
                                                                 cudaStream_t stream) {
  const c10::Stream copies = stream_of(stream);
  if (!is_captured(copies)) {
    const auto address = [](const void* data) { return reinterpret_cast<std::int64_t>(data); };
    const auto count = static_cast<std::int64_t>(bytes);
    order.begin(line_of(copies));
    order.access_at(address(from), line_of(copies), false, "a copy", count);
    order.access_at(address(to), line_of(copies), true, "a copy", count);
  }
  return __real__Z15cudaMemcpyAsyncPvPKvmiP6Stream(to, from, bytes, kind, stream);
}
extern "C" cudaError_t __real__Z15cudaEventRecordP5EventP6Stream(cudaEvent_t, cudaStream_t);
extern "C" cudaError_t __wrap__Z15cudaEventRecordP5EventP6Stream(cudaEvent_t event,
                                                                 cudaStream_t stream) {
  order.record(event, line_of(stream_of(stream)));
  return __real__Z15cudaEventRecordP5EventP6Stream(event, stream);
}
extern "C" cudaError_t __real__Z14cudaEventQueryP5Event(cudaEvent_t);
extern "C" cudaError_t __wrap__Z14cudaEventQueryP5Event(cudaEvent_t event) {
  order.host_waits(event);
  return __real__Z14cudaEventQueryP5Event(event);
}

TORCH_LIBRARY(emulator, m) {
  m.def("kernel_uses(Tensor tensor, bool writes) -> ()", &kernel_uses);
  m.def("bytes_at(int address, int bytes, Device device) -> Tensor", &bytes_at);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  // Without it, torch would look for a kernel of its own.
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
}

}  // namespace emulator

// torch.ops.pycomm: the collectives for torch.compile, opcheck and export. Uses torch's stable ABI,
// so that one build works with every torch from the target version on. The fake kernels are in
// pycomm/ops.py.
#define TORCH_TARGET_VERSION 0x020b000000000000  // the oldest supported torch: 2.11
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "bind/dtypes.h"
#include "bind/gil.h"
#include "bind/python.h"
#include "bind/registry.h"
#include "cpu/group/group.h"

namespace pycomm::bind {
namespace {

using torch::stable::Tensor;

Element element_of(const Tensor& tensor) {
  const std::optional<Element> element = bind::element_of(tensor.scalar_type());
  PYCOMM_CHECK(element.has_value(), "tensor has an unsupported dtype");
  return *element;
}

void run(cpu::Group& group, const Operation& kind, const Tensor& input, const Tensor& output) {
  const Operation operation = carried(kind, element_of(input));
  PYCOMM_CHECK(input.is_contiguous() && output.is_contiguous(), "tensor must be contiguous");
  PYCOMM_CHECK(input.scalar_type() == output.scalar_type(), "input must have output's dtype");
  const void* const from = input.const_data_ptr();
  void* const to = output.mutable_data_ptr();
  PYCOMM_CHECK((from != nullptr && to != nullptr) || operation.count == 0,
               "tensor must have memory");
  Call call{operation, from, to};
  const Tensor& block = operation.collective == Collective::reduce_scatter ? output : input;
  const auto sizes = block.sizes();
  call.details.set_shape(sizes.data(), static_cast<int>(sizes.size()));
  const WithoutTurn no_turn;  // torch has released the GIL
  group.run(call, check_signals);
}

// Checks that a tensor has one block per rank.
void check_blocks(const char* name, const Tensor& whole, const char* block_name,
                  const Tensor& block, int ranks) {
  const std::int64_t needed = block.numel() * ranks;
  PYCOMM_CHECK(whole.numel() == needed, std::string(name) + " must have " + std::to_string(ranks) +
                                            " (the group's size) times as many elements as " +
                                            block_name + ", " + std::to_string(needed) + ", got " +
                                            std::to_string(whole.numel()));
}

void all_reduce_into(const Tensor& output, const Tensor& input, const std::string& op,
                     const std::string& algorithm, const std::string& group) {
  run(*find_group(group),
      {Collective::all_reduce,
       parse<Algorithm>(algorithm, "algorithm"),
       {},
       parse<ReduceOp>(op, "op"),
       0,
       input.numel()},
      input, output);
}

void all_reduce_(Tensor tensor, std::string op, std::string algorithm, std::string group) {
  all_reduce_into(tensor, tensor, op, algorithm, group);
}

Tensor all_reduce(Tensor tensor, std::string op, std::string algorithm, std::string group) {
  const Tensor input = torch::stable::contiguous(tensor);
  const Tensor output = torch::stable::empty_like(input);
  all_reduce_into(output, input, op, algorithm, group);
  return output;
}

// The sum on rank dst, zeros on other ranks: the gradient of broadcast. Thanks to this operation the
// graph of a backward is the same on every rank, so ranks can share a compiler's cache.
Tensor reduce(Tensor tensor, int64_t dst, std::string group) {
  const auto found = find_group(group);
  PYCOMM_CHECK(dst >= 0 && dst < found->size(), "dst must be a rank from 0 to " +
                                                    std::to_string(found->size() - 1) + ", got " +
                                                    std::to_string(dst));
  const Tensor input = torch::stable::contiguous(tensor);
  Tensor output = torch::stable::empty_like(input);
  const Operation operation{
      Collective::reduce, Algorithm::two_shot, {}, ReduceOp::sum, static_cast<std::int32_t>(dst),
      input.numel()};
  if (found->supports({carried(operation, element_of(input)), nullptr, nullptr})) {
    run(*found, operation, input, output);
  } else {  // across nodes
    all_reduce_into(output, input, "sum", "auto", group);
  }
  if (found->rank() != dst) torch::stable::zero_(output);
  return output;
}

void reduce_scatter_(Tensor output, Tensor input, std::string op, std::string group) {
  const auto found = find_group(group);
  check_blocks("input", input, "output", output, found->size());
  run(*found,
      {Collective::reduce_scatter,
       Algorithm::two_shot,
       {},
       parse<ReduceOp>(op, "op"),
       0,
       output.numel()},
      input, output);
}

// Graphs contain the group's size, because shapes depend on it; names of groups repeat from one
// program to the next, so a compiler's cache cannot tell the size from the name.
void check_group_size(std::int64_t group_size, const std::string& group) {
  const int size = find_group(group)->size();
  PYCOMM_CHECK(group_size == size, "group_size must be the group's size, " + std::to_string(size) +
                                       ", got " + std::to_string(group_size));
}

std::vector<std::int64_t> sizes_of(const Tensor& input) {
  const auto sizes = input.sizes();
  PYCOMM_CHECK(sizes.size() > 0, "input must have at least one dimension");
  return {sizes.begin(), sizes.end()};
}

void check_divides(std::int64_t group_size, std::int64_t size) {
  PYCOMM_CHECK(size % group_size == 0, "input's first dimension must be a multiple of " +
                                           std::to_string(group_size) + ", the group's size, got " +
                                           std::to_string(size));
}

Tensor reduce_scatter(Tensor input, std::string op, int64_t group_size, std::string group) {
  check_group_size(group_size, group);
  auto sizes = sizes_of(input);
  check_divides(group_size, sizes[0]);
  sizes[0] /= group_size;
  const Tensor output = torch::stable::new_empty(input, sizes);
  reduce_scatter_(output, torch::stable::contiguous(input), op, group);
  return output;
}

Tensor all_to_all(Tensor input, std::string group) {
  const auto found = find_group(group);
  check_divides(found->size(), sizes_of(input)[0]);
  const Tensor from = torch::stable::contiguous(input);
  const Tensor output = torch::stable::empty_like(from);
  run(*found,
      {Collective::all_to_all,
       Algorithm::two_shot,
       {},
       ReduceOp::sum,
       0,
       input.numel() / found->size()},
      from, output);
  return output;
}

void all_gather_(Tensor output, Tensor input, std::string group) {
  const auto found = find_group(group);
  check_blocks("output", output, "input", input, found->size());
  run(*found, {Collective::all_gather, Algorithm::two_shot, {}, ReduceOp::sum, 0, input.numel()},
      input, output);
}

Tensor all_gather(Tensor input, int64_t group_size, std::string group) {
  check_group_size(group_size, group);
  auto sizes = sizes_of(input);
  sizes[0] *= group_size;
  const Tensor output = torch::stable::new_empty(input, sizes);
  all_gather_(output, torch::stable::contiguous(input), group);
  return output;
}

void broadcast_(Tensor tensor, int64_t src, std::string group) {
  const auto found = find_group(group);
  PYCOMM_CHECK(src >= 0 && src < found->size(), "src must be a rank from 0 to " +
                                                    std::to_string(found->size() - 1) + ", got " +
                                                    std::to_string(src));
  run(*found,
      {Collective::broadcast,
       Algorithm::one_shot,
       {},
       ReduceOp::sum,
       static_cast<std::int32_t>(src),
       tensor.numel()},
      tensor, tensor);
}

Tensor broadcast(Tensor tensor, int64_t src, std::string group) {
  Tensor result = torch::stable::new_empty(tensor, tensor.sizes());
  if (find_group(group)->rank() == src) torch::stable::copy_(result, tensor);
  broadcast_(result, src, group);
  return result;
}

// A kernel whose errors are of the classes that other calls of pycomm raise. torch has a class for few
// exceptions of C++, and which ones depends on its version.
template <auto kernel>
struct Raising;
template <class Result, class... Args, Result (*kernel)(Args...)>
struct Raising<kernel> {
  static Result call(Args... args) {
    try {
      return kernel(std::move(args)...);
    } catch (...) {
      throw_as_python();
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY(pycomm, m) {
  m.def("all_reduce_(Tensor(a!) tensor, str op, str algorithm, str group) -> ()");
  m.def("all_reduce(Tensor tensor, str op, str algorithm, str group) -> Tensor");
  m.def("reduce(Tensor tensor, int dst, str group) -> Tensor");
  m.def("reduce_scatter(Tensor input, str op, int group_size, str group) -> Tensor");
  m.def("all_gather(Tensor input, int group_size, str group) -> Tensor");
  m.def("all_to_all(Tensor input, str group) -> Tensor");
  m.def("broadcast(Tensor tensor, int src, str group) -> Tensor");
  m.def("reduce_scatter_(Tensor(a!) output, Tensor input, str op, str group) -> ()");
  m.def("all_gather_(Tensor(a!) output, Tensor input, str group) -> ()");
  m.def("broadcast_(Tensor(a!) tensor, int src, str group) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pycomm, CPU, m) {
  m.impl("all_reduce_", TORCH_BOX(&Raising<&all_reduce_>::call));
  m.impl("all_reduce", TORCH_BOX(&Raising<&all_reduce>::call));
  m.impl("reduce", TORCH_BOX(&Raising<&reduce>::call));
  m.impl("reduce_scatter", TORCH_BOX(&Raising<&reduce_scatter>::call));
  m.impl("all_gather", TORCH_BOX(&Raising<&all_gather>::call));
  m.impl("all_to_all", TORCH_BOX(&Raising<&all_to_all>::call));
  m.impl("broadcast", TORCH_BOX(&Raising<&broadcast>::call));
  m.impl("reduce_scatter_", TORCH_BOX(&Raising<&reduce_scatter_>::call));
  m.impl("all_gather_", TORCH_BOX(&Raising<&all_gather_>::call));
  m.impl("broadcast_", TORCH_BOX(&Raising<&broadcast_>::call));
}

}  // namespace pycomm::bind

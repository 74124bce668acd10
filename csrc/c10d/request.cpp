#include "c10d/request.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>

#include "bind/dtypes.h"
#include "c10d/arguments.h"

namespace pycomm::c10d {
namespace {

// All-to-all writes blocks while others are still to be read.
void check_disjoint(const at::Tensor& output, const at::Tensor& input) {
  if (!output.is_alias_of(input) || output.numel() == 0 || input.numel() == 0) return;
  const auto begin = [](const at::Tensor& x) {
    return static_cast<const char*>(x.const_data_ptr());
  };
  const auto end = [&](const at::Tensor& x) {
    std::int64_t last = 0;
    for (std::int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
    return begin(x) + (last + 1) * static_cast<std::int64_t>(x.element_size());
  };
  check_argument(end(output) <= begin(input) || end(input) <= begin(output),
                 "output must not overlap input");
}

ReduceOp reduction_of(const ::c10d::ReduceOp& op) {
  switch (op.op_) {
    case ::c10d::ReduceOp::SUM:
    case ::c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::sum;
    case ::c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case ::c10d::ReduceOp::PRODUCT:
      return ReduceOp::prod;
    case ::c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case ::c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case ::c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case ::c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case ::c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    default:
      throw_argument_error(c10::str("op must be a reduction of torch.distributed, got number ",
                                    static_cast<int>(op.op_)));
  }
}

at::Tensor empty_on_host(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU).pinned_memory(true));
}

bool is_captured() {
  bool captured = false;
  with_gil([&] {
    const auto cuda = pybind11::module_::import("torch.cuda");
    captured = cuda.attr("is_current_stream_capturing")().cast<bool>();
  });
  return captured;
}

at::Tensor factor_of(const ::c10d::ReduceOp& op) {
  const auto* given = dynamic_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  check_argument(given != nullptr, "op PREMUL_SUM must hold a factor, got none");
  return given->tensor_factor.defined() ? given->tensor_factor
                                        : at::scalar_tensor(given->double_factor, at::kDouble);
}

}  // namespace

Element element_of(const at::Tensor& tensor) {
  const std::optional<Element> element = bind::element_of(tensor.scalar_type());
  if (element.has_value()) return *element;
  throw_argument_type_error(c10::str("tensors of ", tensor.scalar_type(), " are not supported"));
}

void check_can_be_staged(const char* what) {
  check_argument(!is_captured(), what,
                 " of these tensors goes through host memory, which a CUDA graph cannot capture");
}

void check_can_be_matched(const char* what) {
  check_argument(!is_captured(), what,
                 " is matched on the host, which a CUDA graph cannot capture");
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor plain(const at::Tensor& tensor, Place place) {
  if (place == Place::staged) return empty_on_host(tensor).copy_(tensor.detach());
  return tensor.detach().contiguous().resolve_conj().resolve_neg();
}

void count_write(const at::Tensor& tensor) {
  if (!tensor.is_inference())
    torch::autograd::impl::bump_version(tensor);  // inference tensors have no count
}

at::Tensor memory_to_write(const at::Tensor& output, Place place) {
  if (place != Place::staged && is_plain(output)) {
    count_write(output);
    return output.detach();
  }
  at::assert_no_internal_overlap(output);
  return place == Place::staged ? empty_on_host(output)
                                : at::empty(output.sizes(), output.options());
}

void check_tensor(const at::Tensor& tensor, const char* what, c10::Device device) {
  check_argument(tensor.layout() == at::kStrided, what, " takes dense tensors, got one of layout ",
                 tensor.layout());
  check_argument(tensor.is_cpu() || tensor.is_cuda(), what,
                 " takes tensors on a CPU or a CUDA device, got one on ", tensor.device());
  check_argument(tensor.device() == device, what, " takes tensors on one device, got one on ",
                 device, " and one on ", tensor.device());
}

void check_rank(std::int64_t rank, int ranks, const char* name) {
  check_argument(rank >= 0 && rank < ranks, name, " must be a rank from 0 to ", ranks - 1, ", got ",
                 rank);
}

void check_timeout(Milliseconds timeout) {
  with_argument_errors([&] { timeout_of(std::chrono::duration<double>(timeout).count()); });
}

void Request::all_reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op,
                         Algorithm algorithm) {
  check(tensor);
  const at::Tensor result = to_update(tensor);
  add(Collective::all_reduce, scaled(result, op), result, tensor.numel(), op).operation.algorithm =
      algorithm;
  inputs.push_back(tensor);
  outputs.push_back(tensor);
}

void Request::reduce(const at::Tensor& tensor, const ::c10d::ReduceOp& op, std::int64_t root) {
  check(tensor);
  check_rank(root, ranks_, "dst");
  const at::Tensor result = rank_ == root ? to_update(tensor) : to_read(tensor);
  add(Collective::reduce, scaled(result, op), result, tensor.numel(), op, root);
  inputs.push_back(tensor);
  outputs.push_back(tensor);
}

void Request::broadcast(const at::Tensor& tensor, std::int64_t root) {
  check(tensor);
  check_rank(root, ranks_, "src");
  at::assert_no_internal_overlap(tensor);  // on the root, too, as other ranks would refuse it
  const at::Tensor dense = rank_ == root ? to_read(tensor) : to_update(tensor);
  add(Collective::broadcast, dense, dense, tensor.numel(), {}, root);
  inputs.push_back(tensor);
  outputs.push_back(tensor);
}

void Request::all_gather(const at::Tensor& output, const at::Tensor& input) {
  check_blocks(output, "output", input, "input");
  add(Collective::all_gather, to_read(input), to_write(output), input.numel());
  inputs.push_back(input);
  outputs.push_back(output);
}

void Request::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                             const ::c10d::ReduceOp& op) {
  check_blocks(input, "input", output, "output");
  add(Collective::reduce_scatter, scaled(to_read(input), op), to_write(output), output.numel(), op);
  inputs.push_back(input);
  outputs.push_back(output);
}

void Request::all_to_all(const at::Tensor& output, const at::Tensor& input,
                         const std::vector<std::int64_t>& output_splits,
                         const std::vector<std::int64_t>& input_splits) {
  check(output);
  check(input);
  const bool is_split = !output_splits.empty() || !input_splits.empty();
  if (is_split) stage();  // other ranks' splits may be unequal
  check_argument(output.scalar_type() == input.scalar_type(), "output must have input's dtype, ",
                 input.scalar_type(), ", got ", output.scalar_type());
  check_disjoint(output, input);
  inputs.push_back(input);
  outputs.push_back(output);
  if (is_split) {
    Call& call = add(Collective::all_to_all, to_read(input), to_write(output), 0);
    call.inputs = blocks_of(input, input_splits);
    call.outputs = blocks_of(output, output_splits);
    return;
  }
  check_argument(output.numel() == input.numel(), "output must have input's ", input.numel(),
                 " elements, got ", output.numel());
  check_argument(input.numel() % ranks_ == 0, "input must have a multiple of ", ranks_,
                 " elements, one block per rank, got ", input.numel());
  add(Collective::all_to_all, to_read(input), to_write(output), input.numel() / ranks_);
}

void Request::barrier() {
  const at::Tensor nothing = at::empty(0, at::kByte);
  add(Collective::barrier, nothing, nothing, 0);
}

void Request::all_gather(const Tensors& results, const at::Tensor& input) {
  check(input);
  check_list(results, "tensor_list", input);
  check_own(results, "tensor_list", input);
  stage_unless_equal(results);
  Call& call = add(Collective::all_gather, to_read(input), input, input.numel());
  write_blocks(call, results, Counts::equal);
  inputs.push_back(input);
}

void Request::reduce_scatter(const at::Tensor& output, const Tensors& blocks,
                             const ::c10d::ReduceOp& op) {
  check(output);
  check_list(blocks, "input_list", output);
  check_own(blocks, "input_list", output);
  stage_unless_equal(blocks);
  Tensors products;
  for (const at::Tensor& block : blocks) products.push_back(scaled(block, op));
  Call& call = add(Collective::reduce_scatter, output, to_write(output), output.numel(), op);
  read_blocks(call, products, Counts::equal);
  inputs.insert(inputs.end(), blocks.begin(), blocks.end());
  outputs.push_back(output);
}

void Request::gather(const Tensors& results, const at::Tensor& input, std::int64_t root) {
  check(input);
  check_rank(root, ranks_, "dst");
  Call& call = add(Collective::gather, to_read(input), input, input.numel(), {}, root);
  if (!results.empty()) {
    check_list(results, "gather_list", input);
    check_sizes(results, "gather_list", input.numel());
    write_blocks(call, results, Counts::equal);
  }
  inputs.push_back(input);
}

void Request::scatter(const at::Tensor& output, const Tensors& blocks, std::int64_t root) {
  check(output);
  check_rank(root, ranks_, "src");
  Call& call = add(Collective::scatter, output, to_write(output), output.numel(), {}, root);
  if (!blocks.empty()) {
    check_list(blocks, "scatter_list", output);
    check_sizes(blocks, "scatter_list", output.numel());
    read_blocks(call, blocks, Counts::equal);
  }
  inputs.insert(inputs.end(), blocks.begin(), blocks.end());
  outputs.push_back(output);
}

void Request::all_to_all(const Tensors& results, const Tensors& blocks) {
  check_argument(!results.empty(), "output_tensor_list must have ", ranks_, " tensors, got 0");
  check_list(results, "output_tensor_list", results.front());
  check_list(blocks, "input_tensor_list", results.front());
  for (const at::Tensor& result : results) {
    for (const at::Tensor& block : blocks) check_disjoint(result, block);
  }
  stage();  // other ranks' blocks may differ in size
  Call& call = add(Collective::all_to_all, blocks.front(), results.front(), 0);
  read_blocks(call, blocks, Counts::each_its_own);
  write_blocks(call, results, Counts::each_its_own);
  call.input = call.output = nullptr;
  inputs.insert(inputs.end(), blocks.begin(), blocks.end());
}

void Request::copy_results() {
  const at::NoGradGuard no_grad;
  // Detached here, because a tensor that is detached in inference mode can only be written in that
  // mode, which this thread may not be in.
  for (const auto& [to, from] : copies_) to.detach().copy_(from, /*non_blocking=*/true);
}

void Request::release() {
  inputs.clear();
  copies_.clear();
  kept_.clear();
}

void Request::record_stream(c10::Stream stream) const {
  const auto record = [&](const at::Tensor& tensor) {
    if (tensor.device() == device) tensor.record_stream(stream);
  };
  for (const Tensors* tensors : {&inputs, &outputs, &kept_}) {
    std::for_each(tensors->begin(), tensors->end(), record);
  }
  for (const auto& [to, from] : copies_) record(to), record(from);
}

void Request::stage() {
  if (place_ != Place::device) return;
  check_can_be_staged(title);
  place_ = Place::staged;
}

void Request::stage_unless_equal(const Tensors& list) {
  const auto differs = [&](const at::Tensor& x) { return x.numel() != list.front().numel(); };
  if (std::any_of(list.begin(), list.end(), differs)) stage();
}

at::Tensor Request::to_read(const at::Tensor& tensor) {
  return kept_.emplace_back(plain(tensor, place_));
}

at::Tensor Request::to_write(const at::Tensor& tensor) {
  const at::Tensor memory = memory_to_write(tensor, place_);
  if (memory.is_alias_of(tensor)) {
    kept_.push_back(memory);
  } else {
    copies_.emplace_back(tensor, memory);  // which counts as a write
  }
  return memory;
}

at::Tensor Request::to_update(const at::Tensor& tensor) {
  const at::Tensor dense = to_write(tensor);
  if (!dense.is_alias_of(tensor)) dense.copy_(tensor.detach());
  return dense;
}

at::Tensor Request::scaled(const at::Tensor& tensor, const ::c10d::ReduceOp& op) {
  if (op.op_ != ::c10d::ReduceOp::PREMUL_SUM) return tensor;
  check_argument(tensor.is_floating_point(), "op PREMUL_SUM takes floating-point tensors, got ",
                 tensor.scalar_type());
  kept_.push_back(tensor * factor_of(op).to(tensor.options()));
  return kept_.back();
}

void Request::read_blocks(Call& call, const Tensors& list, Counts counts) {
  if (place_ == Place::device) {
    Tensors flat;
    for (const at::Tensor& part : list) flat.push_back(plain(part, place_).view(-1));
    call.input = kept_.emplace_back(at::cat(flat)).const_data_ptr();
    return;
  }
  BlockArrays& arrays = blocks_.emplace_back();
  for (const at::Tensor& part : list) {
    arrays.addresses.push_back(to_read(part).const_data_ptr());
    arrays.counts.push_back(part.numel());
  }
  call.inputs = made_of(arrays, counts);
}

void Request::write_blocks(Call& call, const Tensors& list, Counts counts) {
  if (place_ == Place::device) {
    const at::Tensor& first = list.front();
    const std::int64_t size = first.numel();
    const auto whole = at::empty(static_cast<std::int64_t>(list.size()) * size, first.options());
    for (std::size_t i = 0; i < list.size(); ++i) {
      at::assert_no_internal_overlap(list[i]);
      const at::Tensor block = whole.narrow(0, static_cast<std::int64_t>(i) * size, size);
      copies_.emplace_back(list[i], block.view(list[i].sizes()));
      outputs.push_back(list[i]);
    }
    call.output = whole.mutable_data_ptr();
    return;
  }
  BlockArrays& arrays = blocks_.emplace_back();
  for (const at::Tensor& part : list) {
    arrays.addresses.push_back(to_write(part).mutable_data_ptr());
    arrays.counts.push_back(part.numel());
    outputs.push_back(part);
  }
  call.outputs = made_of(arrays, counts);
}

// All ranks pass counts, or none does: each rank knows all sizes, except in all_to_all.
Blocks Request::made_of(const BlockArrays& arrays, Counts counts) {
  const std::vector<std::int64_t>& sizes = arrays.counts;
  const bool equal = std::all_of(sizes.begin(), sizes.end(),
                                 [&](std::int64_t size) { return size == sizes.front(); });
  const bool uses_count = counts == Counts::equal && equal;
  return {arrays.addresses.data(), uses_count ? nullptr : sizes.data()};
}

Blocks Request::blocks_of(const at::Tensor& whole, const std::vector<std::int64_t>& splits) {
  ::c10d::checkSplitSizes(splits, whole, ranks_);
  const std::int64_t rows = whole.dim() == 0 ? 1 : whole.size(0);
  const std::int64_t row = rows == 0 ? 0 : whole.numel() / rows;
  BlockArrays& arrays = blocks_.emplace_back();
  for (int r = 0; r < ranks_; ++r) {
    const std::int64_t size = splits.empty() ? rows / ranks_ : splits[static_cast<std::size_t>(r)];
    arrays.counts.push_back(size * row);
  }
  return {nullptr, arrays.counts.data()};
}

void Request::check(const at::Tensor& tensor) const { check_tensor(tensor, title, device); }

void Request::check_blocks(const at::Tensor& whole, const char* name, const at::Tensor& block,
                           const char* block_name) const {
  check(whole);
  check(block);
  check_argument(whole.scalar_type() == block.scalar_type(), name, " must have ", block_name,
                 "'s dtype, ", block.scalar_type(), ", got ", whole.scalar_type());
  check_argument(whole.numel() == block.numel() * ranks_, name, " must have ",
                 block.numel() * ranks_, " elements, ", ranks_, " times as many as ", block_name,
                 ", got ", whole.numel());
}

void Request::check_list(const Tensors& list, const char* name, const at::Tensor& like) const {
  check_argument(static_cast<int>(list.size()) == ranks_, name, " must have ", ranks_,
                 " tensors, one per rank, got ", list.size());
  for (const at::Tensor& part : list) {
    check(part);
    check_argument(part.scalar_type() == like.scalar_type(), name, " must hold tensors of ",
                   like.scalar_type(), ", got one of ", part.scalar_type());
  }
}

void Request::check_sizes(const Tensors& list, const char* name, std::int64_t count) const {
  for (const at::Tensor& part : list) {
    check_argument(part.numel() == count, name, " must hold tensors of ", count,
                   " elements, got one of ", part.numel());
  }
}

void Request::check_own(const Tensors& list, const char* name, const at::Tensor& own) const {
  const std::int64_t count = list[static_cast<std::size_t>(rank_)].numel();
  check_argument(count == own.numel(), name, "[", rank_, "] must have ", own.numel(),
                 " elements, as this rank's tensor, got ", count);
}

Call& Request::add(Collective collective, const at::Tensor& input, const at::Tensor& output,
                   std::int64_t count, const ::c10d::ReduceOp& op, std::int64_t root) {
  Operation operation;
  operation.collective = collective;
  operation.algorithm = Algorithm::two_shot;
  operation.op = reduction_of(op);
  operation.root = static_cast<std::int32_t>(root);
  operation.count = count;
  Call call;
  call.operation = with_argument_errors([&] { return carried(operation, element_of(input)); });
  call.input = input.const_data_ptr();
  call.output = output.mutable_data_ptr();
  // Kernels have the group's timeout.
  if (place_ != Place::device) call.timeout = std::chrono::duration<double>(timeout_).count();
  return calls.emplace_back(call);
}

}  // namespace pycomm::c10d

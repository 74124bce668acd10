// Operations for Python, as objects with named fields, and what they cost.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/python.h"
#include "core/algorithms/select.h"
#include "core/cost.h"
#include "core/errors.h"
#include "cpu/group/group.h"
#include "cpu/internode/stages.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

// Takes names; `dtype` is the caller's. The number of elements is given when the operation runs.
Operation make_operation(const std::string& collective, const std::string& algorithm,
                         const std::string& dtype, const std::string& op, int root,
                         const std::string& device) {
  Operation operation;
  operation.device = parse<Device>(device, "device");
  operation.collective = parse<Collective>(collective, "collective");
  operation.algorithm = parse<Algorithm>(algorithm, "algorithm");
  operation.op = parse<ReduceOp>(op, "op");
  operation.root = root;
  return carried(operation, parse<Element>(dtype, "dtype"));
}

// A compressed call. An address of 0 means that there is no such tensor.
Call make_compressed(const Operation& kind, std::int64_t count, std::uintptr_t input,
                     std::uintptr_t output, const Codec& codec, std::uintptr_t residual,
                     std::uintptr_t velocity, float momentum, std::uint64_t seed,
                     std::uint32_t step, std::int64_t offset, bool hold_unused,
                     std::uintptr_t scale, std::uintptr_t residual_before,
                     std::uintptr_t velocity_before, std::uint16_t tag, const Shape& shape,
                     const std::string& label) {
  Call call = make_call(kind, count, input, output, shape, label);
  call.operation.offset = static_cast<std::uint32_t>(offset / kSmallestBlock);
  call.operation.tag = tag;
  call.operation.codec = codec;
  call.operation.codec.feedback = residual != 0 ? 1 : 0;
  call.feedback.residual = reinterpret_cast<float*>(residual);
  call.feedback.velocity = reinterpret_cast<float*>(velocity);
  call.feedback.momentum = momentum;
  call.feedback.seed = seed;
  call.feedback.step = step;
  call.feedback.hold_unused = hold_unused;
  call.feedback.scale = reinterpret_cast<const float*>(scale);
  call.feedback.residual_before = reinterpret_cast<float*>(residual_before);
  call.feedback.velocity_before = reinterpret_cast<float*>(velocity_before);
  return call;
}

// Addresses and counts of blocks; without counts, all blocks have the same size.
class BlockList {
 public:
  BlockList(const std::vector<std::uintptr_t>& addresses, std::vector<std::int64_t> counts)
      : counts_(std::move(counts)) {
    for (const std::uintptr_t address : addresses) {
      addresses_.push_back(reinterpret_cast<const void*>(address));
    }
  }

  Blocks blocks() const { return {addresses_.data(), counts_.empty() ? nullptr : counts_.data()}; }

 private:
  std::vector<const void*> addresses_;
  std::vector<std::int64_t> counts_;
};

// A tensor is given by its address or, if it has a block per rank, by their list.
Call call_in_blocks(const Operation& kind, std::int64_t count, std::uintptr_t input,
                    std::uintptr_t output, const BlockList* inputs, const BlockList* outputs,
                    const Shape& shape, const std::string& label) {
  Call call{of(kind, count), reinterpret_cast<const void*>(input), reinterpret_cast<void*>(output)};
  call.details = make_details(shape, label);
  if (inputs != nullptr) call.inputs = inputs->blocks();
  if (outputs != nullptr) call.outputs = outputs->blocks();
  return call;
}

py::tuple cost(const cpu::Group& group, const Operation& kind, std::int64_t count, bool zero_copy) {
  const Traffic cost = group.cost(of(kind, count), zero_copy);
  return py::make_tuple(cost.steps, cost.bytes_in, cost.bytes_out);
}

// By partner, the bytes received and sent.
using ByPartner = std::vector<std::pair<std::int64_t, std::int64_t>>;
ByPartner pairs_of(const std::vector<LinkTraffic>& costs) {
  ByPartner pairs;
  for (const LinkTraffic& cost : costs) pairs.emplace_back(cost.received, cost.sent);
  return pairs;
}

}  // namespace

void bind_call(py::module_& m) {
  py::class_<Operation>(m, "Operation")
      .def(py::init(&make_operation), py::kw_only(), py::arg("collective"), py::arg("algorithm"),
           py::arg("dtype"), py::arg("op") = name_of(ReduceOp::sum), py::arg("root") = 0,
           py::arg("device") = name_of(Device::cpu))
      .def("__repr__", [](const Operation& operation) { return describe(operation); });
  py::class_<Call>(m, "Call")
      .def(py::init(&make_compressed), py::arg("operation"), py::arg("count"), py::arg("input"),
           py::arg("output"), py::arg("codec"), py::arg("residual"), py::arg("velocity"),
           py::arg("momentum"), py::arg("seed"), py::arg("step"), py::arg("offset"),
           py::arg("hold_unused") = false, py::arg("scale") = 0, py::arg("residual_before") = 0,
           py::arg("velocity_before") = 0, py::arg("tag") = 0, py::arg("shape") = py::none(),
           py::arg("label") = "")
      .def("set_step", [](Call& call, std::uint32_t step) { call.feedback.step = step; });
  py::class_<BlockList>(m, "Blocks")
      .def(py::init<const std::vector<std::uintptr_t>&, std::vector<std::int64_t>>(),
           py::arg("addresses"), py::arg("counts") = std::vector<std::int64_t>{});
  m.def("call_in_blocks", &call_in_blocks, py::arg("operation"), py::arg("count"), py::arg("input"),
        py::arg("output"), py::arg("inputs"), py::arg("outputs"), py::arg("shape") = py::none(),
        py::arg("label") = "", py::keep_alive<0, 5>(), py::keep_alive<0, 6>());
  m.def("cost", &cost, py::arg("group"), py::arg("operation"), py::arg("count"),
        py::arg("zero_copy"));
  m.def(
      "cost_by_rank",
      [](const cpu::Group& group, const Operation& kind, std::int64_t count, bool zero_copy) {
        return pairs_of(group.cost_by_rank(of(kind, count), zero_copy));
      },
      py::arg("group"), py::arg("operation"), py::arg("count"), py::arg("zero_copy"));
  m.def(
      "link_cost_by_node",
      [](const cpu::Group& group, const Operation& kind, std::int64_t count) {
        return pairs_of(group.link_cost_by_node(of(kind, count)));
      },
      py::arg("group"), py::arg("operation"), py::arg("count"));
  m.def(
      "messages_of_whole_stripe",
      [](int nodes) {
        const MessageCount count = messages_of_whole_stripe(nodes);
        return py::make_tuple(count.sent, count.in_sequence);
      },
      py::arg("nodes"));
  m.def("wire_bytes", &wire_bytes, py::arg("codec"), py::arg("n"), py::arg("ranks"));
  m.def(
      "stripes",
      [](std::vector<std::vector<int>> nodes) { return Nodes{std::move(nodes)}.stripes(); },
      py::arg("nodes"));
  m.def(
      "select_algorithm",
      [](std::int64_t bytes, int ranks, const std::string& device) {
        return name_of(select_algorithm(bytes, ranks, parse<Device>(device, "device")));
      },
      py::arg("bytes"), py::arg("ranks"), py::arg("device"));
  m.def(
      "tree_node",
      [](int tree, int rank, int size) {
        const TreeNode node = tree_node(tree, rank, size);
        return py::make_tuple(node.parent, node.left, node.right);
      },
      py::arg("tree"), py::arg("rank"), py::arg("size"));
  m.attr("pipeline_depth") = kPipelineDepth;
  m.attr("internode_tiles") = cpu::kTiles;
  m.attr("least_transfer_bytes") = cpu::kLeastTransferBytes;
  m.attr("most_tile_bytes") = cpu::kMostTileBytes;
  m.attr("sent_whole_bytes") = kSentWholeBytes;
}

}  // namespace pycomm::bind

// Operations for Python, as objects with named fields, and what they cost.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/python.h"
#include "core/algorithms/select.h"
#include "core/cost.h"
#include "core/errors.h"
#include "cpu/group.h"
#include "cpu/internode/stages.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

// By names. How many elements there are is said when it is run.
Operation make_operation(const std::string& collective, const std::string& algorithm,
                         const std::string& dtype, const std::string& op, int root) {
  Operation operation;
  operation.collective = parse<Collective>(collective, "collective");
  operation.algorithm = parse<Algorithm>(algorithm, "algorithm");
  operation.dtype = parse<DType>(dtype, "dtype");
  operation.op = parse<ReduceOp>(op, "op");
  operation.root = root;
  return operation;
}

py::tuple cost(const cpu::Group& group, const Operation& kind, std::int64_t count, bool zero_copy) {
  const Traffic cost = group.cost(of(kind, count), zero_copy);
  return py::make_tuple(cost.steps, cost.bytes_in, cost.bytes_out);
}

py::tuple link_cost(const cpu::Group& group, const Operation& kind, std::int64_t count) {
  const LinkTraffic cost = group.link_cost(of(kind, count));
  return py::make_tuple(cost.sent, cost.received);
}

}  // namespace

void bind_call(py::module_& m) {
  py::class_<Operation>(m, "Operation")
      .def(py::init(&make_operation), py::kw_only(), py::arg("collective"), py::arg("algorithm"),
           py::arg("dtype"), py::arg("op") = name_of(ReduceOp::sum), py::arg("root") = 0)
      .def("__repr__", [](const Operation& operation) { return describe(operation); });
  m.def("cost", &cost, py::arg("group"), py::arg("operation"), py::arg("count"),
        py::arg("zero_copy"));
  m.def("link_cost", &link_cost, py::arg("group"), py::arg("operation"), py::arg("count"));
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
  m.attr("tree_piece_bytes") = kTreePieceBytes;
  m.attr("pipeline_depth") = kPipelineDepth;
  m.attr("internode_tiles") = cpu::kTiles;
  m.attr("least_transfer_bytes") = cpu::kLeastTransferBytes;
  m.attr("most_tile_bytes") = cpu::kMostTileBytes;
}

}  // namespace pycomm::bind

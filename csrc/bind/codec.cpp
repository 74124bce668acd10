// Python bindings of codecs, and of encoding and decoding outside a group.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/codecs/cast.h"
#include "cpu/codecs/topk_comm.h"
#include "cpu/codecs/wire.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

Codec make_codec(int kind, int values, bool stochastic, std::int64_t block, std::int64_t k) {
  Codec codec;
  codec.kind = static_cast<CodecKind>(kind);
  codec.values = static_cast<DType>(values);
  codec.stochastic = stochastic ? 1 : 0;
  codec.block = static_cast<std::uint32_t>(block);
  PYCOMM_CHECK(k >= 0 && k < std::int64_t{1} << 32,
               "k must be from 0 to 2^32 - 1, got " + std::to_string(k));
  codec.k = static_cast<std::uint32_t>(k);
  return codec;
}

bool encode(const Codec& codec, int dtype, std::uintptr_t x, std::int64_t n, std::uintptr_t wire,
            std::uint64_t seed, std::uint32_t step, std::int64_t offset) {
  check_memory(x, n);
  const WithoutGil no_gil;
  return cpu::encode(codec, static_cast<DType>(dtype), reinterpret_cast<const void*>(x), n,
                     reinterpret_cast<std::byte*>(wire), {seed, step}, {offset});
}

bool decode(const Codec& codec, std::uintptr_t wire, std::int64_t bytes, std::int64_t n, int dtype,
            std::uintptr_t output, bool add) {
  check_memory(wire, bytes);
  check_memory(output, n);
  const WithoutGil no_gil;
  return cpu::decode(codec, reinterpret_cast<const std::byte*>(wire), bytes, n,
                     static_cast<DType>(dtype), reinterpret_cast<void*>(output), add);
}

// The largest contribution of a node that cannot make a sum, or its result, infinite.
float largest_safe(const Codec& codec, int dtype, int op, int nodes, int world) {
  Operation operation;
  operation.codec = codec;
  operation.algorithm = Algorithm::two_shot;
  operation.op = static_cast<ReduceOp>(op);
  return pycomm::largest_safe(
      operation, nodes, largest_result(static_cast<DType>(dtype), operation.op, nodes, world));
}

// Writes at most k indices and values; returns their number.
std::int64_t select(int dtype, std::uintptr_t x, std::int64_t n, std::int64_t k,
                    std::uintptr_t indices, std::uintptr_t values) {
  check_memory(x, n);
  const WithoutGil no_gil;
  auto* const index_of = reinterpret_cast<std::int64_t*>(indices);
  auto* const value_of = reinterpret_cast<float*>(values);
  std::int64_t found = 0;
  for (const cpu::Entry& entry :
       cpu::select(static_cast<DType>(dtype), reinterpret_cast<const void*>(x), n, k)) {
    index_of[found] = entry.index;
    value_of[found++] = entry.value;
  }
  return found;
}

}  // namespace

void bind_codec(py::module_& m) {
  py::class_<Codec>(m, "Codec")
      .def(py::init(&make_codec), py::arg("kind"), py::arg("values") = 0,
           py::arg("stochastic") = false, py::arg("block") = 0, py::arg("k") = 0)
      .def("__repr__", [](const Codec& codec) { return describe(codec); });
  m.attr("smallest_block") = kSmallestBlock;
  m.attr("most_topk_elements") = kMostTopkElements;
  m.attr("owned_elements") = kOwnedElements;
  m.attr("topk_chunk") = kTopkChunk;
  m.attr("topk_spread") = kSpread;
  m.attr("result_stream") = kResultStream;
  m.def("encoded_bytes", &encoded_bytes, py::arg("codec"), py::arg("n"));
  m.def("encode", &encode, py::arg("codec"), py::arg("dtype"), py::arg("x"), py::arg("n"),
        py::arg("wire"), py::arg("seed"), py::arg("step"), py::arg("offset"));
  m.def("decode", &decode, py::arg("codec"), py::arg("wire"), py::arg("bytes"), py::arg("n"),
        py::arg("dtype"), py::arg("output"), py::arg("add"));
  m.def("largest_safe", &largest_safe, py::arg("codec"), py::arg("dtype"), py::arg("op"),
        py::arg("nodes"), py::arg("world"));
  m.def("select", &select, py::arg("dtype"), py::arg("x"), py::arg("n"), py::arg("k"),
        py::arg("indices"), py::arg("values"));
}

}  // namespace pycomm::bind

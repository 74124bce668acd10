// Python bindings of a group's CUDA side (cuda/group.h) and of codecs on CUDA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/backend_table.h"
#include "cpu/memory/device_heap.h"
#include "cuda/codecs/wire.h"
#include "cuda/group.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cuda::Endpoint;
using cuda::HostRegistration;
using cuda::SharedLaunch;

// Destroying a group waits for its device, so other Python threads must be able to run. A forked child
// leaks its parent's group.
struct DeleteWithoutGil {
  void operator()(cuda::Group* group) const {
    if (group->forked()) return;
    const KeepTurn keep;
    const WithoutGil no_gil;
    delete group;
  }
};

// Without an endpoint, the memory is no device's, and nothing is waited for.
std::shared_ptr<cpu::DeviceHeap> make_heap(std::uintptr_t begin, std::int64_t bytes,
                                           const std::shared_ptr<Endpoint>& endpoint,
                                           const std::shared_ptr<cpu::Group>& host) {
  if (endpoint == nullptr) {
    return std::make_shared<cpu::DeviceHeap>(begin, bytes, [] { return true; });
  }
  // Tensors keep the heap, but must not keep the group.
  const auto wait = [known = std::weak_ptr(endpoint), of = std::weak_ptr(host)] {
    const auto device = known.lock();
    const auto group = of.lock();
    return device != nullptr && group != nullptr && cpu::await_unused(*device, *group);
  };
  return std::make_shared<cpu::DeviceHeap>(begin, bytes, wait);
}

void run_bucket(cuda::Group& group, const std::vector<Call>& calls, std::uintptr_t nonfinite,
                std::uintptr_t workspace, std::uintptr_t stream) {
  const WithoutGil no_gil;
  group.run(
      calls, stream,
      {{}, reinterpret_cast<std::uint32_t*>(nonfinite), reinterpret_cast<std::byte*>(workspace)});
}

std::int64_t bucket_workspace_bytes(const std::vector<Call>& calls, int ranks) {
  std::vector<cuda::Part> parts;
  for (const Call& call : calls) {
    if (call.operation.codec.kind != CodecKind::none) parts.push_back({call.operation});
  }
  return cuda::workspace_bytes(parts, ranks);
}

// A job on a device: its stream and workspace, and elements in the device's memory.
cuda::WireJob wire_job(int device, std::uintptr_t stream, std::uintptr_t workspace,
                       const Codec& codec, int dtype, std::int64_t n, std::uintptr_t elements,
                       std::uintptr_t wire) {
  cuda::WireJob job;
  job.device = device;
  job.stream = stream;
  job.codec = codec;
  job.dtype = static_cast<DType>(dtype);
  job.n = n;
  job.elements = reinterpret_cast<std::byte*>(elements);
  job.wire = reinterpret_cast<std::byte*>(wire);
  job.workspace = reinterpret_cast<std::byte*>(workspace);
  return job;
}

void cuda_encode(int device, std::uintptr_t stream, std::uintptr_t workspace, const Codec& codec,
                 int dtype, std::uintptr_t x, std::int64_t n, std::uintptr_t wire,
                 std::uint64_t seed, std::uint32_t step, std::int64_t offset,
                 std::uint32_t stream_of_bits, std::int64_t run, std::int64_t stride) {
  const WithoutGil no_gil;
  cuda::WireJob job = wire_job(device, stream, workspace, codec, dtype, n, x, wire);
  job.random = {seed, step, stream_of_bits};
  job.places = places_of(offset, run, stride);
  cuda::encode(job);
}

void cuda_decode(int device, std::uintptr_t stream, std::uintptr_t workspace, const Codec& codec,
                 std::uintptr_t wire, std::int64_t bytes, std::int64_t n, int dtype,
                 std::uintptr_t output, bool add, bool checks) {
  const WithoutGil no_gil;
  cuda::decode(wire_job(device, stream, workspace, codec, dtype, n, output, wire), bytes, add,
               checks);
}

std::int64_t cuda_select(int device, std::uintptr_t stream, std::uintptr_t workspace,
                         const Codec& codec, int dtype, std::uintptr_t x, std::int64_t n,
                         std::uintptr_t indices, std::uintptr_t values) {
  const WithoutGil no_gil;
  return cuda::select(wire_job(device, stream, workspace, codec, dtype, n, x, 0),
                      reinterpret_cast<std::int64_t*>(indices), reinterpret_cast<float*>(values));
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.attr("has_cuda") = cuda::available();
  py::class_<cuda::Region>(m, "CudaRegion")
      .def(py::init<std::int64_t, std::vector<std::uintptr_t>, std::vector<std::uintptr_t>,
                    std::uintptr_t>(),
           py::arg("bytes"), py::arg("here"), py::arg("there"), py::arg("multicast") = 0);
  py::class_<Endpoint, std::shared_ptr<Endpoint>>(m, "CudaEndpoint")
      .def(py::init([](int device, int rank, int ranks, int lanes, std::int64_t staging_bytes,
                       double timeout, cuda::Region window, bool one_address_space,
                       bool stage_always, std::int64_t message_bytes) {
             return std::make_shared<Endpoint>(cuda::EndpointOptions{
                 device, rank, ranks, lanes, staging_bytes, timeout, std::move(window),
                 one_address_space, stage_always, cuda::kLaneBytes, message_bytes});
           }),
           py::arg("device"), py::arg("rank"), py::arg("ranks"), py::arg("lanes"),
           py::arg("staging_bytes"), py::arg("timeout"), py::arg("window"),
           py::arg("one_address_space"), py::arg("stage_always"), py::arg("message_bytes"),
           py::call_guard<WithoutGil>())
      .def("extend", &Endpoint::extend, py::arg("region"), py::call_guard<WithoutGil>())
      .def("place_of", &Endpoint::place_of, py::arg("address"), py::arg("bytes"))
      .def("address_of", &Endpoint::address_of, py::arg("rank"), py::arg("place"))
      .def(
          "serve_messages",
          [](const Endpoint& endpoint, cpu::Group& group) {
            group.serve_device(endpoint.message_copies());
          },
          py::arg("group"));
  py::class_<cpu::DeviceHeap, std::shared_ptr<cpu::DeviceHeap>>(m, "DeviceHeap")
      .def(py::init(&make_heap), py::arg("begin"), py::arg("bytes"), py::arg("endpoint").none(true),
           py::arg("host").none(true))
      .def("take", &cpu::DeviceHeap::take, py::arg("bytes"), py::arg("may_wait"),
           py::call_guard<WithoutGil>())
      .def("release", &cpu::DeviceHeap::release)
      .def("extend", &cpu::DeviceHeap::extend, py::arg("begin"), py::arg("bytes"))
      .def("has_room", &cpu::DeviceHeap::has_room, py::arg("bytes"), py::call_guard<WithoutGil>())
      .def("close", &cpu::DeviceHeap::close, py::call_guard<WithoutGil>())
      .def("refusal", &cpu::DeviceHeap::refusal, py::arg("bytes"));
  py::class_<HostRegistration>(m, "CudaHostRegistration")
      .def(py::init([](int device, const std::shared_ptr<cpu::Group>& group, int rank,
                       std::int64_t offset, std::int64_t bytes) {
             return std::make_unique<HostRegistration>(device, group->address(rank, offset, bytes),
                                                       bytes);
           }),
           py::arg("device"), py::arg("group"), py::arg("rank"), py::arg("offset"),
           py::arg("bytes"), py::keep_alive<1, 3>())  // the memory is unpinned before it goes
      .def_property_readonly("address", &HostRegistration::address);
  py::class_<SharedLaunch, std::shared_ptr<SharedLaunch>>(m, "CudaSharedLaunch")
      .def(py::init<std::vector<std::shared_ptr<Endpoint>>>(), py::arg("endpoints"));
  py::class_<cuda::Group, std::unique_ptr<cuda::Group, DeleteWithoutGil>>(m, "CudaGroup")
      .def(py::init([](std::shared_ptr<cpu::Group> host, std::shared_ptr<Endpoint> endpoint,
                       std::shared_ptr<SharedLaunch> shared) {
             return std::unique_ptr<cuda::Group, DeleteWithoutGil>(new cuda::Group(
                 std::move(host), std::move(endpoint), std::move(shared), check_signals));
           }),
           py::arg("host"), py::arg("endpoint"), py::arg("shared").none(true))
      .def_property_readonly(  // for the torch.distributed backend, while the object lives
          "handle", [](cuda::Group& group) { return py::capsule(&group, kCudaCapsule); })
      .def("check", &cuda::Group::check, py::call_guard<WithoutGil>())
      .def("check_operation",
           [](const cuda::Group& group, const Operation& operation) { group.admit({operation}); })
      .def("close", &cuda::Group::close, py::call_guard<WithoutGil>())
      .def("run",
           [](cuda::Group& group, const Operation& kind, std::int64_t count, std::uintptr_t input,
              std::uintptr_t output, std::uintptr_t stream, const Shape& shape,
              const std::string& label) {
             const WithoutGil no_gil;
             group.run(make_call(kind, count, input, output, shape, label), stream);
           })
      .def("run_bucket", &run_bucket);
  m.def("cuda_completed", &cuda::completed, py::arg("event"));
  m.def("cuda_encode", &cuda_encode);
  m.def("cuda_decode", &cuda_decode);
  m.def("cuda_select", &cuda_select);
  m.def("cuda_workspace_bytes",
        py::overload_cast<const Codec&, std::int64_t>(&cuda::workspace_bytes), py::arg("codec"),
        py::arg("n"));
  m.def("cuda_bucket_workspace_bytes", &bucket_workspace_bytes, py::arg("calls"), py::arg("ranks"));
  m.def("cuda_least_staging_bytes", &cuda::least_staging_bytes, py::arg("ranks"), py::arg("lanes"));
  m.def("cuda_window_bytes", &cuda::window_bytes, py::arg("ranks"), py::arg("lanes"),
        py::arg("staging_bytes"), py::arg("heap_bytes"));
  m.def("cuda_heap_begin", &cuda::heap_begin, py::arg("ranks"), py::arg("lanes"),
        py::arg("staging_bytes"));
}

}  // namespace pycomm::bind

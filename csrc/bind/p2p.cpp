// Python bindings of sends and receives. Arguments are numbers and pointers, not tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bind/gil.h"
#include "bind/python.h"
#include "cpu/group/group.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cpu::Group;
using cpu::p2p::Envelope;
using cpu::p2p::Options;
using cpu::p2p::Port;
using cpu::p2p::Request;
using cpu::p2p::RequestPtr;

Envelope envelope(int peer, std::int32_t tag, int element, std::int64_t bytes) {
  return {peer, tag, static_cast<Element>(element), bytes};
}

// `timeout` in seconds; 0 is the group's. `on_device` is the tensor's address there, or 0.
Options options(double timeout, std::uintptr_t on_device = 0, std::uintptr_t stream = 0) {
  Options made{.interrupt = check_signals,
               .always_timed = timeout != 0,
               .on_device = reinterpret_cast<void*>(on_device),
               .stream = stream};
  if (made.always_timed) made.timeout = timeout_of(timeout);
  return made;
}

void send(Group& group, std::uintptr_t data, std::int64_t bytes, int element, int to,
          std::int32_t tag, double timeout, std::uintptr_t on_device, std::uintptr_t stream) {
  const WithoutGil no_gil;
  group.send(reinterpret_cast<const void*>(data), envelope(to, tag, element, bytes),
             options(timeout, on_device, stream));
}

int recv(Group& group, std::uintptr_t data, std::int64_t bytes, int element, int from,
         std::int32_t tag, double timeout) {
  const WithoutGil no_gil;
  return group.recv(reinterpret_cast<void*>(data), envelope(from, tag, element, bytes),
                    options(timeout));
}

RequestPtr isend(Group& group, std::uintptr_t data, std::int64_t bytes, int element, int to,
                 std::int32_t tag, double timeout, std::uintptr_t on_device,
                 std::uintptr_t stream) {
  const WithoutGil no_gil;
  return group.isend(reinterpret_cast<const void*>(data), envelope(to, tag, element, bytes),
                     options(timeout, on_device, stream));
}

RequestPtr irecv(Group& group, std::uintptr_t data, std::int64_t bytes, int element, int from,
                 std::int32_t tag, double timeout, std::uintptr_t on_device) {
  const WithoutGil no_gil;
  return group.irecv(reinterpret_cast<void*>(data), envelope(from, tag, element, bytes),
                     options(timeout, on_device));
}

// An address in Python: host, port, secret, name of the socket for knocks.
using AddressTuple = std::tuple<std::string, int, py::bytes, std::string>;

AddressTuple tuple_of(const Port::Address& address) {
  const auto* const secret = reinterpret_cast<const char*>(address.secret.data());
  return {address.host, address.port, py::bytes(secret, address.secret.size()), address.knock};
}

void meet(Port& port, const std::vector<AddressTuple>& tuples) {
  std::vector<Port::Address> addresses;
  for (const auto& [host, number, secret, knock] : tuples) {
    addresses.push_back({host, number, secret_of(secret), knock});
  }
  port.meet(std::move(addresses));
}

}  // namespace

void bind_p2p(py::module_& m, GroupClass& group) {
  py::class_<Port, std::shared_ptr<Port>>(m, "Port")
      .def(py::init<const std::string&>(), py::arg("host"))
      .def_property_readonly("address", [](const Port& port) { return tuple_of(port.address()); })
      .def("meet", &meet, py::arg("addresses"))
      .def(
          "host_of", [](const Port& port, int rank) { return port.of(rank).host; },
          py::arg("rank"));
  py::class_<Request, RequestPtr>(m, "Request")
      .def(
          "wait", [](Request& request) { request.wait(check_signals); },
          py::call_guard<WithoutGil>())
      .def("completed", &Request::completed)
      .def_property_readonly("source", [](const Request& request) { return request.source; })
      .def_property_readonly("arrived_on_device",
                             [](const Request& request) { return request.arrived_on_device; });
  group
      .def("send", &send, py::arg("data"), py::arg("bytes"), py::arg("element"), py::arg("to"),
           py::arg("tag"), py::arg("timeout") = 0.0, py::arg("on_device") = 0,
           py::arg("stream") = 0)
      .def("recv", &recv, py::arg("data"), py::arg("bytes"), py::arg("element"), py::arg("source"),
           py::arg("tag"), py::arg("timeout") = 0.0)
      .def("isend", &isend, py::keep_alive<0, 1>(), py::arg("data"), py::arg("bytes"),
           py::arg("element"), py::arg("to"), py::arg("tag"), py::arg("timeout") = 0.0,
           py::arg("on_device") = 0, py::arg("stream") = 0)
      .def("irecv", &irecv, py::keep_alive<0, 1>(), py::arg("data"), py::arg("bytes"),
           py::arg("element"), py::arg("source"), py::arg("tag"), py::arg("timeout") = 0.0,
           py::arg("on_device") = 0)
      .def("reaches", &Group::reaches, py::arg("device"), py::arg("peer"), py::arg("bytes"));
  py::dict numbers;
  for (const ElementRow& row : kElementRows) {
    numbers[name_of(row.element)] = static_cast<int>(row.element);
  }
  m.attr("element_numbers") = numbers;
  m.attr("most_seconds") = kMostSeconds;
  m.attr("any_source") = cpu::p2p::kAnySource;
}

}  // namespace pycomm::bind

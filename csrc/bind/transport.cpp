// Python bindings of transports between nodes. The transport over torch.distributed is written in
// Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <string_view>

#include "bind/gil.h"
#include "bind/python.h"
#include "cpu/internode/transport.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cpu::Batch;
using cpu::LocalTransport;
using cpu::Transfer;
using cpu::Transport;

// A transport whose post(), stop(), disconnect() and leave() are defined by a Python class.
class PythonTransport : public Transport {
 public:
  using Transport::Transport;
  void post(const Batch& batch) override {
    const WithGil gil;
    const py::function function = find("post");
    PYCOMM_CHECK(function, "the group's connection to other nodes is closed");
    call_python(function, py::make_tuple(transfers(batch.sends), transfers(batch.receives)));
  }
  void stop(std::span<const std::byte> farewell) override { end("stop", farewell); }
  void disconnect() override { end("disconnect"); }
  void leave(std::span<const std::byte> farewell) override { end("leave", farewell); }
  int awaited() const override { return awaited_; }
  void await(int node) { awaited_ = node; }

 private:
  static constexpr int kAttempts = 3;

  py::function find(const char* name) const {
    return py::get_override(static_cast<const Transport*>(this), name);
  }
  // Called also from destructors and threads, in which no caller could handle a failure, and while
  // another error is being handled.
  template <class... Bytes>
  void end(const char* name, const Bytes&... farewell) const {
    const WithGil gil;
    const py::error_scope on_its_way;
    bool interrupted = false;
    // If a signal handler raises in the middle, the call is repeated.
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      try {
        const py::function function = find(name);
        if (function) call_python(function, py::make_tuple(bytes(farewell)...));
        break;
      } catch (const PythonError&) {
        if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0) {
          interrupted = true;
          PyErr_Clear();
        } else {
          PyErr_WriteUnraisable(nullptr);
        }
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable(name);
      }
    }
    if (interrupted) PyErr_SetInterrupt();  // the caller gets the signal later
  }
  static py::bytes bytes(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  static py::list transfers(const std::vector<Transfer>& transfers) {
    py::list list;
    for (const Transfer& transfer : transfers) {
      list.append(py::make_tuple(transfer.node, reinterpret_cast<std::uintptr_t>(transfer.data),
                                 transfer.bytes));
    }
    return list;
  }

  std::atomic<int> awaited_{-1};
};

std::span<const std::byte> span_of(const py::bytes& bytes) {
  return std::as_bytes(std::span(std::string_view(bytes)));
}

}  // namespace

Secret secret_of(const py::bytes& bytes) {
  Secret secret;
  const std::span<const std::byte> given = span_of(bytes);
  PYCOMM_CHECK(given.size() == secret.size(), "secret must have " + std::to_string(secret.size()) +
                                                  " bytes, got " + std::to_string(given.size()));
  std::copy(given.begin(), given.end(), secret.begin());
  return secret;
}

void bind_transport(py::module_& m) {
  m.attr("farewell_bytes") = sizeof(Farewell);
  m.attr("message_version") = kMessageVersion;
  py::class_<Transport, PythonTransport, std::shared_ptr<Transport>>(m, "Transport")
      .def(py::init([](const py::bytes& secret) { return new PythonTransport(secret_of(secret)); }),
           py::arg("secret"))
      .def("complete", &Transport::complete)
      .def("lose", &Transport::lose, py::arg("node"))
      .def("fail", &Transport::fail, py::arg("node"))
      .def("finished", &Transport::finished, py::arg("node"))
      .def(
          "heard",
          [](Transport& transport, int node, const py::bytes& farewell) {
            transport.heard(node, span_of(farewell));
          },
          py::arg("node"), py::arg("farewell"))
      .def(
          "told",
          [](Transport& transport, int node, std::uint64_t word) {
            const Farewell farewell{header_of(MessageKind::farewell, {transport.secret(), node}),
                                    word};
            transport.heard(node, std::as_bytes(std::span(&farewell, 1)));
          },
          py::arg("node"), py::arg("word"))
      .def(
          "await_node",
          [](Transport& transport, int node) {
            dynamic_cast<PythonTransport&>(transport).await(node);
          },
          py::arg("node"));
  py::class_<LocalTransport, Transport, std::shared_ptr<LocalTransport>>(m, "LocalTransport")
      .def_static("make", &LocalTransport::make, py::arg("nodes"));
}

}  // namespace pycomm::bind

// Python bindings of optimizer steps: settings, tables of pointers, and torch's threads. The
// bindings of sharded steps are in bind/sharded.cpp.
#define TORCH_TARGET_VERSION 0x020b000000000000  // the oldest supported torch: 2.11
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/stable/ops.h>

#include "bind/gil.h"
#include "bind/optim.h"
#include "cpu/memory/huge_pages.h"
#include "cpu/optim/loops.h"
#include "cpu/optim/step.h"
#include "cuda/optim/step.h"

namespace py = pybind11;

namespace pycomm::bind {

void torch_parallel(std::int64_t n, const cpu::Body& body) {
  // The least number of chunks per thread: fewer are done before another thread has woken up.
  constexpr std::int64_t kGrain = 16;
  torch::stable::parallel_for(0, n, kGrain, body);
}

namespace {

std::vector<Segment> segments_of(const py::buffer& table) {
  const py::buffer_info info = table.request();
  const std::span<const Segment> rows = rows_of<Segment>(info);
  return {rows.begin(), rows.end()};
}

double grad_norm(const py::buffer& table, std::uintptr_t grad_scale, std::uintptr_t found_inf,
                 std::uintptr_t clip, double max_norm) {
  const std::vector<Segment> segments = segments_of(table);
  const WithoutGil no_gil;
  return cpu::grad_norm(segments, control(grad_scale, found_inf, clip), max_norm, torch_parallel);
}

void step(const Settings& settings, const py::buffer& table, std::uintptr_t grad_scale,
          std::uintptr_t found_inf, std::uintptr_t clip) {
  const std::vector<Segment> segments = segments_of(table);
  const WithoutGil no_gil;
  cpu::step(settings, segments, control(grad_scale, found_inf, clip), torch_parallel);
}

std::vector<std::pair<double, double>> lamb_sums(const Settings& settings, const py::buffer& table,
                                                 std::uintptr_t grad_scale,
                                                 std::uintptr_t found_inf, std::uintptr_t clip) {
  const std::vector<Segment> segments = segments_of(table);
  std::vector<std::pair<double, double>> sums;
  const WithoutGil no_gil;
  for (const cpu::LambSums& sum :
       cpu::lamb_sums(settings, segments, control(grad_scale, found_inf, clip), torch_parallel)) {
    sums.emplace_back(sum.weights, sum.directions);
  }
  return sums;
}

cpu::Numbers codes(std::uintptr_t data, std::uintptr_t largest, bool squares) {
  const Role role = squares ? Role::second_moment : Role::first_moment;
  return {Storage::code8, role, reinterpret_cast<std::byte*>(data),
          reinterpret_cast<float*>(largest), nullptr};
}

void decode_state(std::uintptr_t from, std::uintptr_t largest, std::int64_t n, bool squares,
                  std::uintptr_t to) {
  const WithoutGil no_gil;
  cpu::load_chunk(codes(from, largest, squares), 0, n, reinterpret_cast<float*>(to));
}

void encode_state(std::uintptr_t from, std::int64_t n, bool squares, std::uintptr_t to,
                  std::uintptr_t largest) {
  const WithoutGil no_gil;
  cpu::store_chunk(codes(to, largest, squares), 0, n, reinterpret_cast<const float*>(from),
                   nullptr);
}

// An optimizer's segments on a device, and its steps there.
class DeviceTable {
 public:
  std::int64_t set(const py::buffer& table) { return table_.set(segments_of(table)); }

  void upload(std::uintptr_t memory, int device, std::uintptr_t stream) {
    table_.upload(reinterpret_cast<void*>(memory), device, stream);
    device_ = device;
    stream_ = stream;
  }

  void grad_norm(std::uintptr_t grad_scale, std::uintptr_t found_inf, std::uintptr_t clip,
                 double max_norm, bool sets_found, std::uintptr_t norm) const {
    cuda::grad_norm(job(control(grad_scale, found_inf, clip)),
                    {max_norm, sets_found, reinterpret_cast<double*>(norm)});
  }

  void step(const Settings& settings, std::int64_t first, std::int64_t count,
            std::uintptr_t grad_scale, std::uintptr_t found_inf, std::uintptr_t clip,
            std::uintptr_t lr, bool lr_is_double) const {
    cuda::step(job(control(grad_scale, found_inf, clip)),
               {first, count, settings, reinterpret_cast<const void*>(lr), lr_is_double});
  }

 private:
  cuda::StepJob job(const StepControl& control) const {
    return {device_, stream_, &table_, control};
  }

  cuda::SegmentTable table_;
  int device_ = 0;
  std::uintptr_t stream_ = 0;
};

Settings make_settings(int rule, const py::kwargs& values) {
  Settings settings;
  settings.rule = static_cast<Rule>(rule);
  const py::object self = py::cast(&settings, py::return_value_policy::reference);
  for (const auto& [name, value] : values) py::setattr(self, name, value);
  return settings;
}

}  // namespace

void bind_optim(py::module_& m) {
  m.attr("sum_block") = kSumBlock;
  m.attr("segment_words") = sizeof(Segment) / 8;
  py::class_<Settings>(m, "OptimizerSettings")
      .def(py::init(&make_settings), py::arg("rule"))
      .def_readwrite("amsgrad", &Settings::amsgrad)
      .def_readwrite("decoupled", &Settings::decoupled)
      .def_readwrite("nesterov", &Settings::nesterov)
      .def_readwrite("maximize", &Settings::maximize)
      .def_readwrite("adapt", &Settings::adapt)
      .def_readwrite("stochastic", &Settings::stochastic)
      .def_readwrite("lr", &Settings::lr)
      .def_readwrite("beta1", &Settings::beta1)
      .def_readwrite("beta2", &Settings::beta2)
      .def_readwrite("eps", &Settings::eps)
      .def_readwrite("weight_decay", &Settings::weight_decay)
      .def_readwrite("momentum", &Settings::momentum)
      .def_readwrite("dampening", &Settings::dampening)
      .def_readwrite("seed", &Settings::seed);
  m.def(
      "advise_huge_pages",
      [](std::uintptr_t data, std::int64_t bytes) {
        cpu::advise_huge_pages(reinterpret_cast<void*>(data), bytes);
      },
      py::arg("data"), py::arg("bytes"));
  py::class_<DeviceTable>(m, "DeviceTable")
      .def(py::init())
      .def("set", &DeviceTable::set, py::arg("table"))
      .def("upload", &DeviceTable::upload, py::arg("memory"), py::arg("device"), py::arg("stream"))
      .def("grad_norm", &DeviceTable::grad_norm, py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("clip"), py::arg("max_norm"), py::arg("sets_found"), py::arg("norm"))
      .def("step", &DeviceTable::step, py::arg("settings"), py::arg("first"), py::arg("count"),
           py::arg("grad_scale"), py::arg("found_inf"), py::arg("clip"), py::arg("lr"),
           py::arg("lr_is_double"));
  m.def("decode_state", &decode_state, py::arg("codes"), py::arg("largest"), py::arg("n"),
        py::arg("squares"), py::arg("values"));
  m.def("encode_state", &encode_state, py::arg("values"), py::arg("n"), py::arg("squares"),
        py::arg("codes"), py::arg("largest"));
  m.def("optimizer_grad_norm", &grad_norm, py::arg("table"), py::arg("grad_scale"),
        py::arg("found_inf"), py::arg("clip"), py::arg("max_norm"));
  m.def("lamb_ratio", &lamb_ratio, py::arg("weights"), py::arg("directions"));
  m.def("optimizer_lamb_sums", &lamb_sums, py::arg("settings"), py::arg("table"),
        py::arg("grad_scale"), py::arg("found_inf"), py::arg("clip"));
  m.def("optimizer_step", &step, py::arg("settings"), py::arg("table"), py::arg("grad_scale"),
        py::arg("found_inf"), py::arg("clip"));
}

}  // namespace pycomm::bind

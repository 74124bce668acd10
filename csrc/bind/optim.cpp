// Python bindings of optimizer steps: settings, tables of pointers, and torch's threads.
#define TORCH_TARGET_VERSION 0x020b000000000000  // the oldest supported torch: 2.11
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <span>

#include "bind/gil.h"
#include "bind/python.h"
#include "cpu/group.h"
#include "cpu/huge_pages.h"
#include "cpu/optim/loops.h"
#include "cpu/optim/sharded_average.h"
#include "cpu/optim/sharded_step.h"
#include "cpu/optim/step.h"
#include "cuda/optim/step.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

// The least number of chunks per thread: fewer are done before another thread has woken up.
constexpr std::int64_t kGrain = 16;

// Runs on torch's own threads, as many as torch has been told to use. A second thread pool would
// compete with them for the cores.
void torch_parallel(std::int64_t n, const cpu::Body& body) {
  torch::stable::parallel_for(0, n, kGrain, body);
}

// A table of segments or shards, which Python fills in as 64-bit words.
template <class Row>
std::span<const Row> rows_of(const py::buffer_info& info) {
  PYCOMM_CHECK(info.itemsize == 8 && info.ndim == 1 && info.strides[0] == 8,
               "table must be a row of 64-bit words");
  const auto bytes = static_cast<std::size_t>(info.size) * 8;
  PYCOMM_CHECK(bytes % sizeof(Row) == 0, "table must hold whole rows");
  return {static_cast<const Row*>(info.ptr), bytes / sizeof(Row)};
}

std::vector<Segment> segments_of(const py::buffer& table) {
  const py::buffer_info info = table.request();
  const std::span<const Segment> rows = rows_of<Segment>(info);
  return {rows.begin(), rows.end()};
}

StepControl control(std::uintptr_t grad_scale, std::uintptr_t found_inf, std::uintptr_t clip) {
  return {reinterpret_cast<const float*>(grad_scale), reinterpret_cast<float*>(found_inf),
          reinterpret_cast<float*>(clip)};
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

// One rank's part of a sharded step.
class ShardedStep {
 public:
  ShardedStep(std::uintptr_t arena, std::int64_t arena_bytes, std::uintptr_t sums)
      : step_{.groups = {},
              .shards = {},
              .arena = reinterpret_cast<std::byte*>(arena),
              .arena_bytes = arena_bytes,
              .sums = reinterpret_cast<double*>(sums),
              .control = {},
              .max_norm = 0.0,
              .measures = false,
              .parallel = torch_parallel} {}

  // Adds a group of parameters, as a table of shards.
  void add(const Settings& settings, const py::buffer& table) {
    const py::buffer_info info = table.request();
    const std::span<const cpu::Shard> rows = rows_of<cpu::Shard>(info);
    step_.shards.insert(step_.shards.end(), rows.begin(), rows.end());
    step_.groups.push_back({settings, step_.shards.size()});
  }

  // Runs the step, and returns the norm if it is measured.
  double run(cpu::Group& group, std::uintptr_t grad_scale, std::uintptr_t found_inf,
             std::uintptr_t clip, double max_norm, bool measures, const std::string& label) {
    const WithoutGil no_gil;
    step_.control = control(grad_scale, found_inf, clip);
    step_.max_norm = max_norm;
    step_.measures = measures;
    group.run(cpu::sharded_call(step_, label), check_signals);
    return step_.norm;
  }

  bool half_done() const { return step_.half_done; }

  // The phases of run() one by one, for ranks on several nodes, with exchanges in between.

  void begin(std::uintptr_t grad_scale, std::uintptr_t found_inf, std::uintptr_t clip,
             double max_norm) {
    step_.control = control(grad_scale, found_inf, clip);
    step_.max_norm = max_norm;
    update_.emplace(step_);
    update_->use_arenas({step_.arena}, 0);
  }
  // What ranks must have alike.
  std::string compared(const std::string& label) const {
    const float* const scale = step_.control.grad_scale;
    return cpu::compared(step_,
                         scale == nullptr ? label : label + ", scale " + std::to_string(*scale));
  }
  std::int64_t sums() { return update().sums(); }
  void note_found(bool found) { update().note_found(found); }
  void measure() {
    const WithoutGil no_gil;
    update().measure();
  }
  double conclude_norm() {
    update().conclude_norm();
    return step_.norm;
  }
  bool adapts() { return update().adapts(); }
  void measure_ratios() {
    const WithoutGil no_gil;
    update().measure_ratios();
  }
  void conclude_ratios() { update().conclude_ratios(); }
  bool skips() { return update().skips(); }
  void finish() {
    const WithoutGil no_gil;
    update().update();
  }

 private:
  cpu::ShardUpdate& update() {
    PYCOMM_CHECK(update_.has_value(), "begin() must come first");
    return *update_;
  }

  cpu::ShardedStep step_;
  std::optional<cpu::ShardUpdate> update_;
};

// A sharded average, to be submitted; it must live until the work has completed.
class ShardedAverage {
 public:
  ShardedAverage(std::uintptr_t arena, std::int64_t arena_bytes, const py::buffer& table)
      : average_{{}, reinterpret_cast<std::byte*>(arena), arena_bytes} {
    const py::buffer_info info = table.request();
    const std::span<const cpu::OwnGradient> rows = rows_of<cpu::OwnGradient>(info);
    average_.gradients.assign(rows.begin(), rows.end());
  }

  std::shared_ptr<cpu::Work> submit(cpu::Group& group, const std::string& label) {
    const WithoutGil no_gil;
    return group.submit({cpu::average_call(average_, label)});
  }

 private:
  cpu::ShardedAverage average_;
};

cpu::Numbers codes(std::uintptr_t data, std::uintptr_t largest, bool squares) {
  return {Storage::code8, squares, reinterpret_cast<std::byte*>(data),
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
  py::class_<ShardedStep>(m, "ShardedStep")
      .def(py::init<std::uintptr_t, std::int64_t, std::uintptr_t>(), py::arg("arena"),
           py::arg("arena_bytes"), py::arg("sums"))
      .def("add", &ShardedStep::add, py::arg("settings"), py::arg("table"))
      .def("run", &ShardedStep::run, py::arg("group"), py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("clip"), py::arg("max_norm"), py::arg("measures"), py::arg("label"))
      .def_property_readonly("half_done", &ShardedStep::half_done)
      .def("begin", &ShardedStep::begin, py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("clip"), py::arg("max_norm"))
      .def("compared", &ShardedStep::compared, py::arg("label"))
      .def_property_readonly("sums", &ShardedStep::sums)
      .def("note_found", &ShardedStep::note_found, py::arg("found"))
      .def("measure", &ShardedStep::measure)
      .def("conclude_norm", &ShardedStep::conclude_norm)
      .def("adapts", &ShardedStep::adapts)
      .def("measure_ratios", &ShardedStep::measure_ratios)
      .def("conclude_ratios", &ShardedStep::conclude_ratios)
      .def("skips", &ShardedStep::skips)
      .def("finish", &ShardedStep::finish);
  py::class_<ShardedAverage>(m, "ShardedAverage")
      .def(py::init<std::uintptr_t, std::int64_t, const py::buffer&>(), py::arg("arena"),
           py::arg("arena_bytes"), py::arg("table"))
      .def("submit", &ShardedAverage::submit, py::arg("group"), py::arg("label"));
  m.def("decode_state", &decode_state, py::arg("codes"), py::arg("largest"), py::arg("n"),
        py::arg("squares"), py::arg("values"));
  m.def("encode_state", &encode_state, py::arg("values"), py::arg("n"), py::arg("squares"),
        py::arg("codes"), py::arg("largest"));
  m.def("optimizer_grad_norm", &grad_norm, py::arg("table"), py::arg("grad_scale"),
        py::arg("found_inf"), py::arg("clip"), py::arg("max_norm"));
  m.def("optimizer_step", &step, py::arg("settings"), py::arg("table"), py::arg("grad_scale"),
        py::arg("found_inf"), py::arg("clip"));
}

}  // namespace pycomm::bind

// Python bindings of sharded steps, on the CPU and on CUDA.
#include <pybind11/pybind11.h>

#include <optional>

#include "bind/gil.h"
#include "bind/optim.h"
#include "bind/python.h"
#include "cpu/group/group.h"
#include "cpu/optim/sharded_step.h"
#include "cuda/group.h"
#include "cuda/optim/sharded.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

// One rank's part of a sharded step.
class ShardedStep {
 public:
  ShardedStep(std::uintptr_t arena, std::int64_t arena_bytes, std::uintptr_t sums) {
    step_.arena = reinterpret_cast<std::byte*>(arena);
    step_.arena_bytes = arena_bytes;
    step_.sums = reinterpret_cast<double*>(sums);
    step_.parallel = torch_parallel;
  }

  // Adds a group of parameters, as a table of shards.
  void add(const Settings& settings, const py::buffer& table) {
    const py::buffer_info info = table.request();
    const std::span<const Shard> rows = rows_of<Shard>(info);
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
  // What must be the same on all ranks.
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
    PYCOMM_CHECK(update_.has_value(), "begin() must be called first");
    return *update_;
  }

  cpu::ShardedStep step_;
  std::optional<cpu::ShardUpdate> update_;
};

// A rank's sharded steps on a device, each in this order: clear, add, set, run.
class CudaShardedStep {
 public:
  CudaShardedStep(std::uintptr_t arena, std::int64_t arena_bytes, std::uintptr_t sums) {
    step_.arena = reinterpret_cast<std::byte*>(arena);
    step_.arena_bytes = arena_bytes;
    step_.sums = reinterpret_cast<double*>(sums);
  }

  void clear() {
    step_.groups.clear();
    step_.shards.clear();
  }

  // Adds a group of parameters. `lr`, if not 0, replaces the settings' learning rate.
  void add(const Settings& settings, const py::buffer& table, std::uintptr_t lr,
           bool lr_is_double) {
    const py::buffer_info info = table.request();
    const std::span<const Shard> rows = rows_of<Shard>(info);
    step_.shards.insert(step_.shards.end(), rows.begin(), rows.end());
    step_.groups.push_back(
        {settings, step_.shards.size(), reinterpret_cast<const void*>(lr), lr_is_double});
  }

  // Returns the bytes of device memory that the step needs.
  std::int64_t set(std::uintptr_t grad_scale, std::uintptr_t found_inf, std::uintptr_t clip,
                   double max_norm, bool measures, std::uintptr_t norm) {
    step_.control = control(grad_scale, found_inf, clip);
    step_.max_norm = max_norm;
    step_.measures = measures;
    step_.norm = reinterpret_cast<double*>(norm);
    return table_.set(step_);
  }

  // Enqueues the step. `memory` must live until it has run.
  void run(cuda::Group& group, std::uintptr_t memory, int device, std::uintptr_t stream,
           const std::string& label) {
    const WithoutGil no_gil;
    table_.upload(reinterpret_cast<void*>(memory), device, stream);
    group.run(cuda::step_call(step_, label), stream, table_.sharding());
  }

 private:
  cuda::ShardedStep step_;
  cuda::ShardTable table_;
};

}  // namespace

void bind_sharded(py::module_& m) {
  m.attr("shard_words") = sizeof(Shard) / 8;
  m.attr("shard_sums") = static_cast<int>(kShardSums);
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
  py::class_<CudaShardedStep>(m, "CudaShardedStep")
      .def(py::init<std::uintptr_t, std::int64_t, std::uintptr_t>(), py::arg("arena"),
           py::arg("arena_bytes"), py::arg("sums"))
      .def("clear", &CudaShardedStep::clear)
      .def("add", &CudaShardedStep::add, py::arg("settings"), py::arg("table"), py::arg("lr"),
           py::arg("lr_is_double"))
      .def("set", &CudaShardedStep::set, py::arg("grad_scale"), py::arg("found_inf"),
           py::arg("clip"), py::arg("max_norm"), py::arg("measures"), py::arg("norm"))
      .def("run", &CudaShardedStep::run, py::arg("group"), py::arg("memory"), py::arg("device"),
           py::arg("stream"), py::arg("label"));
}

}  // namespace pycomm::bind

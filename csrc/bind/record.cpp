// Reports of what ranks do, as dicts and lists.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/errors.h"
#include "cpu/group.h"
#include "cpu/onlooker.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

py::dict to_python(const Recorded& recorded) {
  Operation operation = recorded.operation;
  operation.details = 0;  // a hash, which would tell nobody anything
  py::dict made;
  made["sequence"] = recorded.number;
  made["operation"] = name_of(operation.collective);
  made["description"] = describe(operation);
  made["bytes"] = operation.count * size_of(operation.dtype);
  made["entered"] = recorded.entered;
  made["done"] = recorded.done == 0 ? py::object(py::none()) : py::float_(recorded.done);
  return made;
}

}  // namespace

py::dict to_python(const GroupState& group) {
  py::list ranks;
  for (const RankState& state : group.ranks) {
    py::list operations;
    for (const Recorded& recorded : state.recorded) operations.append(to_python(recorded));
    py::dict rank;
    rank["rank"] = state.rank;
    rank["pid"] = state.pid;
    rank["gone"] = state.gone;
    rank["waits_for"] = state.waits_for < 0 ? py::object(py::none()) : py::int_(state.waits_for);
    rank["elsewhere"] = state.elsewhere;
    rank["operations"] = operations;
    ranks.append(rank);
  }
  py::dict made;
  made["time"] = group.time;
  made["size"] = group.size;
  made["failed"] = group.failed;
  made["ranks"] = ranks;
  return made;
}

void bind_record(py::module_& m, GroupClass& group) {
  group.def(
      "state",
      [](cpu::Group& group, std::size_t most) {
        const GroupState state = [&] {
          const WithoutGil no_gil;
          return group.state(most);
        }();
        return to_python(state);
      },
      py::arg("most"));
  py::class_<cpu::Onlooker>(m, "Onlooker")
      .def(py::init<int, std::int64_t>(), py::arg("fd"), py::arg("position"))
      .def(
          "state",
          [](const cpu::Onlooker& onlooker, std::size_t most) {
            return to_python(onlooker.state(most));
          },
          py::arg("most"));
  m.attr("most_recorded") = cpu::kRecords;
  m.attr("window_magic") = cpu::kMagic;
}

}  // namespace pycomm::bind

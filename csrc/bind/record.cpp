// Reports of what ranks do, as dicts and lists.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/errors.h"
#include "cpu/group/group.h"
#include "cpu/observe/window_reader.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

py::dict to_python(Operation operation) {
  operation.details = 0;  // a hash, which means nothing to a reader
  py::dict made;
  made["operation"] = name_of(operation.collective);
  made["description"] = describe(operation);
  made["bytes"] = operation.count * size_of(operation.dtype);
  return made;
}

py::dict to_python(const Recorded& recorded) {
  py::dict made = to_python(recorded.operation);
  made["sequence"] = recorded.number;
  made["entered"] = recorded.entered;
  made["subject"] = recorded.subject;
  made["done"] = recorded.done == 0 ? py::object(py::none()) : py::float_(recorded.done);
  return made;
}

py::dict to_python(const Launched& launched) {
  py::dict made;
  if (launched.operation) {
    made = to_python(*launched.operation);
  } else {
    made["operation"] = "";
    made["description"] = "whose record has been overwritten";
    made["bytes"] = 0;
  }
  const char* const states[] = {"launched", "running", "done"};
  made["sequence"] = launched.number;
  made["captured"] = launched.captured;
  made["state"] = states[static_cast<int>(launched.state)];
  made["launched"] = launched.launched;
  made["since"] = launched.since;
  made["subject"] = launched.subject;
  return made;
}

py::dict to_python(const NodeState& node) {
  py::dict made;
  made["node"] = node.node;
  made["ranks"] = node.ranks;
  made["peer"] = node.peer < 0 ? py::object(py::none()) : py::int_(node.peer);
  made["awaited"] = node.awaited;
  made["lost"] = node.lost;
  made["told"] = node.told;
  return made;
}

}  // namespace

py::dict to_python(const GroupState& group) {
  py::list ranks;
  for (const RankState& state : group.ranks) {
    py::list operations;
    for (const Recorded& recorded : state.recorded) operations.append(to_python(recorded));
    py::list launched;
    for (const Launched& launch : state.launched) launched.append(to_python(launch));
    py::dict rank;
    rank["rank"] = state.rank;
    rank["pid"] = state.pid;
    rank["gone"] = state.gone;
    rank["waits_for"] = state.waits_for < 0 ? py::object(py::none()) : py::int_(state.waits_for);
    rank["elsewhere"] = state.elsewhere;
    rank["operations"] = operations;
    rank["launched"] = launched;
    rank["memory"] = state.memory;
    ranks.append(rank);
  }
  py::list nodes;
  for (const NodeState& node : group.nodes) nodes.append(to_python(node));
  py::dict made;
  made["time"] = group.time;
  made["size"] = group.size;
  made["failed"] = group.failed;
  made["ranks"] = ranks;
  made["nodes"] = nodes;
  made["group"] = group.name;
  return made;
}

namespace {

py::dict to_python(const cpu::Times& times, double scale) {
  py::dict buckets;
  for (const auto& [bucket, count] : times.buckets) buckets[py::int_(bucket)] = count;
  py::dict made;
  made["seconds"] = static_cast<double>(times.ticks) * scale;
  made["buckets"] = buckets;
  return made;
}

py::dict to_python(const cpu::Group::Statistics& statistics) {
  const double scale = statistics.seconds_per_tick;
  py::list ranks, operations, middles;
  const auto add = [&](const cpu::CountedOperations& counted, const char* device) {
    py::dict operation;
    operation["operation"] = name_of(counted.collective);
    operation["codec"] = name_of(counted.codec);
    operation["device"] = device;
    operation["size"] = counted.size;
    operation["count"] = counted.count;
    operation["bytes"] = counted.bytes;
    operation["whole"] = to_python(counted.whole, scale);
    operation["exchange"] = to_python(counted.exchange, scale);
    operations.append(operation);
  };
  for (const auto& [rank, own, blocked] : statistics.ranks) {
    ranks.append(py::make_tuple(rank, static_cast<double>(own) * scale,
                                static_cast<double>(blocked) * scale));
  }
  for (const cpu::CountedOperations& counted : statistics.operations) add(counted, "cpu");
  for (const cpu::CountedOperations& counted : statistics.on_device) add(counted, "cuda");
  for (int i = 0; i < cpu::kBuckets; ++i) middles.append(cpu::middle_of(i) * scale);
  py::dict made;
  made["ranks"] = ranks;
  made["operations"] = operations;
  made["middles"] = middles;
  made["memory"] = statistics.memory;
  return made;
}

}  // namespace

void bind_record(py::module_& m, GroupClass& group) {
  group.def(
      "state",
      [](cpu::Group& group, std::size_t most, bool only_own) {
        const GroupState state = [&] {
          const WithoutGil no_gil;
          return group.state(most, only_own);
        }();
        return to_python(state);
      },
      py::arg("most"), py::arg("only_own") = false);
  group.def_property("subject", &cpu::Group::subject, &cpu::Group::set_subject);
  group.def("show_memory", &cpu::Group::show_memory, py::arg("figures"),
            py::call_guard<WithoutGil>());
  group.def("statistics", [](cpu::Group& group) {
    const auto statistics = [&] {
      const WithoutGil no_gil;
      return group.statistics();
    }();
    return to_python(statistics);
  });
  py::class_<cpu::WindowReader>(m, "WindowReader")
      .def(py::init<int, std::int64_t>(), py::arg("fd"), py::arg("position"))
      .def(
          "state",
          [](const cpu::WindowReader& onlooker, std::size_t most) {
            return to_python(onlooker.state(most));
          },
          py::arg("most"));
  m.attr("most_recorded") = cpu::kRecords;
  m.attr("timed_from_bytes") = cpu::kTimedFrom;
  m.attr("window_magic") = cpu::kMagic;
}

}  // namespace pycomm::bind

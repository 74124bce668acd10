// pycomm._C: groups, windows and works as Python objects. Arguments are numbers and pointers, not
// tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>

#include "bind/fast_call.h"
#include "bind/gil.h"
#include "bind/python.h"
#include "bind/registry.h"
#include "core/algorithms/table.h"
#include "core/optim/table.h"
#include "cpu/executor/threads.h"
#include "cpu/group/fork.h"
#include "cpu/group/group.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cpu::Clock;
using cpu::Group;
using cpu::Heap;
using cpu::Liveness;
using cpu::Process;
using cpu::Transport;
using cpu::Window;
using cpu::Work;

// Memory in a rank's heap, which Python accesses through the buffer protocol. Made and destroyed by
// threads that have the GIL.
class Allocation {
 public:
  Allocation(std::shared_ptr<Heap> heap, std::int64_t bytes)
      : heap_(std::move(heap)), bytes_(bytes), data_(take(*heap_, bytes)) {
    all_[data_] = this;
  }
  ~Allocation() {
    all_.erase(data_);
    if (!lent_) heap_->free(data_);
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  // The memory around this address stays as long as the window's file, because other ranks use it
  // from now on, and do not say until when.
  static void lend(std::uintptr_t address) {
    const auto data = reinterpret_cast<std::byte*>(address);
    const auto after = all_.upper_bound(data);
    if (after == all_.begin()) return;
    Allocation& allocation = *std::prev(after)->second;
    if (data < allocation.data_ + allocation.bytes_) allocation.lent_ = true;
  }

  py::buffer_info buffer() const {
    return {data_, 1, py::format_descriptor<std::uint8_t>::format(), 1, {bytes_}, {1}};
  }

 private:
  static std::byte* take(Heap& heap, std::int64_t bytes) {
    const WithoutGil no_gil;
    return heap.allocate(bytes);
  }

  std::shared_ptr<Heap> heap_;
  std::int64_t bytes_;
  std::byte* data_;
  bool lent_ = false;

  static inline std::map<std::byte*, Allocation*> all_;  // by address
};

// Destroying a group may wait for its worker, so other threads must be able to run.
void delete_group(Group* group) {
  // In a forked process, the group is leaked: its condition variable's waiter does not exist here,
  // so the variable could not be destroyed.
  if (group->forked()) return;
  // Also leaked if the interpreter is finalizing, which may have put the worker to sleep.
  if (finalizing()) return;
  const KeepTurn keep;
  if (PyGILState_Check() != 0) {
    const WithoutGil no_gil;
    delete group;
  } else {
    delete group;
  }
}

void run_kind(Group& group, const Operation& kind, std::int64_t count, std::uintptr_t input,
              std::uintptr_t output, const Shape& shape, const std::string& label) {
  const WithoutGil no_gil;
  group.run(make_call(kind, count, input, output, shape, label), check_signals);
}

std::shared_ptr<Work> submit_kind(Group& group, const Operation& kind, std::int64_t count,
                                  std::uintptr_t input, std::uintptr_t output, const Shape& shape,
                                  const std::string& label) {
  const WithoutGil no_gil;
  return group.submit({make_call(kind, count, input, output, shape, label)});
}

bool run_call(Group& group, const Call& call) {
  const WithoutGil no_gil;
  return group.run(call, check_signals);
}

// Calls that are made once and submitted in many steps.
class Exchange {
 public:
  explicit Exchange(std::vector<Call> calls) : calls_(std::move(calls)) {}

  std::shared_ptr<Work> submit(Group& group, std::uint32_t step) {
    const WithoutGil no_gil;
    for (Call& call : calls_) call.feedback.step = step;
    return group.submit(calls_);
  }

 private:
  std::vector<Call> calls_;
};

double seconds_of(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

std::shared_ptr<Work> submit_call(Group& group, const Call& call) {
  const WithoutGil no_gil;
  return group.submit({call});
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (...) {
    set_python_error();
  }
}

void bind_works_and_windows(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def(
          "wait", [](Work& work) { work.wait(check_signals); }, py::call_guard<WithoutGil>())
      .def("completed", &Work::completed)
      .def("nonfinite", &Work::nonfinite)
      .def("moved", &Work::moved)
      .def("interval", [](const Work& work) {
        const auto [begin, end] = work.interval();
        return py::make_tuple(seconds_of(begin), seconds_of(end));
      });

  py::class_<Allocation>(m, "Allocation", py::buffer_protocol())
      .def_buffer([](Allocation& allocation) { return allocation.buffer(); })
      .def_static("lend", &Allocation::lend, py::arg("address"));

  py::class_<Process, std::shared_ptr<Process>>(m, "Process")
      .def_static("find", &Process::find, py::arg("pid"))
      .def_property_readonly("ended", &Process::ended);

  py::class_<Window, std::shared_ptr<Window>>(m, "Window")
      .def(py::init<int, int, std::int64_t, std::int64_t>(), py::arg("fd"), py::arg("ranks"),
           py::arg("slice_bytes"), py::arg("staging_bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "reserve",
          [](const Window& window, int owner, int ranks, const std::vector<int>& departed) {
            const Window::Place place = window.reserve(owner, ranks, departed);
            return py::make_tuple(place.owner, place.offset, place.id);
          },
          py::arg("owner"), py::arg("ranks"), py::arg("departed"))
      .def(
          "cancel",
          [](const Window& window, int owner, std::int64_t offset, std::uint64_t id) {
            window.cancel({owner, offset, id});
          },
          py::arg("owner"), py::arg("offset"), py::arg("id"))
      .def(
          "part",
          [](const Window& window, std::vector<int> members, int rank, int owner,
             std::int64_t offset, std::uint64_t id) {
            return std::make_shared<Window>(window, std::move(members), rank,
                                            Window::Place{owner, offset, id});
          },
          py::arg("members"), py::arg("rank"), py::arg("owner"), py::arg("offset"), py::arg("id"),
          py::call_guard<py::gil_scoped_release>())
      .def("leave", &Window::leave, py::arg("rank"))
      .def("depart", &Window::depart, py::call_guard<py::gil_scoped_release>());
  m.def("create_window", &Window::create, py::arg("ranks"), py::arg("slice_bytes"),
        py::arg("staging_bytes"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "create_file",
      [](std::int64_t bytes, const std::string& name) {
        const int fd = cpu::make_window_file(bytes, name.c_str());
        try {
          cpu::reserve_in_file(fd, 0, bytes);
        } catch (...) {
          close(fd);
          throw;
        }
        return fd;
      },
      py::arg("bytes"), py::arg("name"), py::call_guard<py::gil_scoped_release>());
  m.def("thread_limits", &cpu::thread_limits);
  m.def(
      "close_in_children", [](const std::vector<int>& sockets) { cpu::close_in_children(sockets); },
      py::arg("sockets"));
  m.def(
      "make_private_in_children",
      [](std::uintptr_t data, std::int64_t bytes, int fd, std::int64_t position) {
        cpu::make_private_in_children(reinterpret_cast<std::byte*>(data), bytes, fd, position);
      },
      py::arg("data"), py::arg("bytes"), py::arg("fd"), py::arg("position"));
  m.def(
      "leave_as_is_in_children",
      [](std::uintptr_t data, std::int64_t bytes) {
        cpu::leave_as_is_in_children(reinterpret_cast<std::byte*>(data), bytes);
      },
      py::arg("data"), py::arg("bytes"));
  // Keeps the GIL: if another thread made a step between the copy and the fork, the child would get
  // tensors in windows from before the step, and all others from after it.
  m.def("copy_at_fork", &cpu::copy_at_fork);
  m.attr("window_layout") = cpu::kLayout;
}

// The rows of a table; pycomm/_runtime/algorithm_table.py has checked them.
std::vector<AlgorithmRow> table_of(const std::vector<py::dict>& given) {
  std::vector<AlgorithmRow> rows;
  for (const py::dict& fields : given) {
    AlgorithmRow& row = rows.emplace_back();
    const auto limit = [&](const char* name, auto& most) {
      if (fields.contains(name)) most = fields[name].cast<std::decay_t<decltype(most)>>();
    };
    limit("nodes", row.max_nodes);
    limit("ranks", row.max_ranks);
    limit("bytes", row.max_bytes);
    row.algorithm = parse<Algorithm>(fields["algorithm"].cast<std::string>(), "algorithm");
  }
  return rows;
}

void bind_group(py::module_& m) {
  GroupClass group(m, "Group");
  group
      .def(py::init([](std::shared_ptr<Window> window, std::vector<int> pids,
                       std::vector<std::shared_ptr<Process>> processes, int rank, int size,
                       int cores, double timeout, std::uint32_t first_epoch,
                       std::vector<int> numbers) {
             auto peers = std::make_shared<const Liveness>(std::move(pids), std::move(processes),
                                                           std::move(numbers));
             return std::shared_ptr<Group>(new Group(std::move(window), std::move(peers), rank,
                                                     size, cores, timeout_of(timeout), first_epoch),
                                           delete_group);
           }),
           py::arg("window"), py::arg("pids"), py::arg("processes"), py::arg("rank"),
           py::arg("size"), py::arg("cores"), py::arg("timeout"), py::arg("first_epoch") = 0,
           py::arg("numbers") = std::vector<int>{})
      .def(
          "span",
          [](Group& group, std::vector<std::vector<int>> nodes, int here,
             std::shared_ptr<Transport> transport, std::shared_ptr<cpu::p2p::Port> port,
             double timeout, const std::vector<py::dict>& algorithms) {
            group.span({std::move(nodes), here}, std::move(transport), std::move(port),
                       timeout_of(timeout), table_of(algorithms));
          },
          py::arg("nodes"), py::arg("here"), py::arg("transport"), py::arg("port"),
          py::arg("timeout"), py::arg("algorithms"), py::keep_alive<1, 4>())
      .def("matching_row", &Group::matching_row, py::arg("bytes"))
      .def(
          "in_rank_order",
          [](const Group& group, const std::string& algorithm) {
            return name_of(group.in_rank_order(parse<Algorithm>(algorithm, "algorithm")));
          },
          py::arg("algorithm"))
      .def("run", &run_kind, py::arg("operation"), py::arg("count"), py::arg("input"),
           py::arg("output"), py::arg("shape") = py::none(), py::arg("label") = "")
      .def("submit", &submit_kind, py::arg("operation"), py::arg("count"), py::arg("input"),
           py::arg("output"), py::arg("shape") = py::none(), py::arg("label") = "")
      .def("run_call", &run_call)
      .def("submit_call", &submit_call)
      .def_property_readonly("handle", &handle_of)
      .def(
          "abort", [](Group& group) { group.abort(); }, py::call_guard<WithoutGil>())
      .def_property_readonly("unresponsive", &Group::unresponsive)
      .def_property_readonly("ended_by", &Group::ended_by)
      .def("raise_again", &Group::raise_again)
      .def("set_name", &Group::set_name, py::arg("name"))
      .def(
          "trim", [](Group& group) { group.trim(check_signals); }, py::call_guard<WithoutGil>())
      .def("leave", &Group::leave, py::call_guard<WithoutGil>())
      .def(
          "end_waits_of",
          [](Group& group, const std::vector<std::shared_ptr<Group>>& others) {
            group.end_waits_of(others);
          },
          py::arg("others"), py::call_guard<WithoutGil>())
      .def(
          "should_commit",
          [](Group& group, bool ready) { return group.should_commit(ready, check_signals); },
          py::arg("ready"), py::call_guard<WithoutGil>())
      .def(
          "shrink",
          [](Group& group, double patience, const std::vector<int>& excluded) {
            cpu::Survivors survivors = group.shrink(timeout_of(patience), check_signals, excluded);
            return std::make_pair(std::move(survivors.window), std::move(survivors.members));
          },
          py::arg("patience"), py::arg("excluded"), py::call_guard<WithoutGil>())
      .def(
          "close", [](Group& group) { group.close(check_signals); }, py::call_guard<WithoutGil>())
      .def("allocate",
           [](Group& group, std::int64_t bytes) {
             return std::make_unique<Allocation>(group.heap(), bytes);
           })
      .def("allocate_for_good", &Group::allocate_for_good, py::arg("bytes"),
           py::call_guard<WithoutGil>())
      .def("offset_of", &Group::offset_of, py::arg("data"))
      .def("address", &Group::address, py::arg("rank"), py::arg("offset"), py::arg("bytes"))
      .def("check_usable", &Group::check_usable)
      .def("usable", &Group::usable)
      .def("idle", &Group::idle, py::call_guard<WithoutGil>())
      .def_property_readonly("slot_bytes",
                             [](const Group& group) { return group.comm().slot_bytes(); })
      .def_property_readonly("sequence", [](const Group& group) { return group.comm().ordinal(); })
      .def_property_readonly("traffic",
                             [](const Group& group) {
                               const Traffic& traffic = group.comm().traffic();
                               return py::make_tuple(traffic.steps, traffic.bytes_in,
                                                     traffic.bytes_out);
                             })
      .def_property_readonly("link_traffic",
                             [](const Group& group) {
                               const LinkTraffic traffic = group.link_traffic();
                               return py::make_tuple(traffic.sent, traffic.received);
                             })
      .def(
          "published",
          [](const Group& group, int rank) {
            PYCOMM_CHECK(rank >= 0 && rank < group.comm().size(),
                         "rank must be the index of a rank of this node, from 0 to " +
                             std::to_string(group.comm().size() - 1) + ", got " +
                             std::to_string(rank));
            py::tuple counts(kChannels + 1);
            counts[0] = group.comm().announced(rank);
            for (int i = 0; i < kChannels; ++i) counts[i + 1] = group.comm().published(rank, i);
            return counts;
          },
          py::arg("rank"));
  bind_p2p(m, group);
  bind_record(m, group);
  py::class_<Exchange>(m, "Exchange")
      .def(py::init<std::vector<Call>>(), py::arg("calls"))
      .def("submit", &Exchange::submit);
  m.def("set_turn", &set_turn, py::arg("turn"));
  m.def("register_group", &register_group, py::arg("name"), py::arg("group"));
}

// A dict from the name of each value of an enum to its number.
template <class Enum>
py::dict numbers() {
  py::dict all;
  for (int i = 0; i < kCountOf<Enum>; ++i) all[name_of(static_cast<Enum>(i))] = i;
  return all;
}

// The names of callers' element types.
py::list element_names() {
  py::list names;
  for (const ElementRow& row : kElementRows) names.append(name_of(row.element));
  return names;
}

// The names of the algorithms with a property.
py::list algorithms_with(bool (*property)(Algorithm)) {
  py::list names;
  for (int i = 0; i < kCountOf<Algorithm>; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    if (property(algorithm)) names.append(name_of(algorithm));
  }
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(translate);  // torch may share our pybind11 internals
  bind_dense_tensor(m);
  bind_fast_call(m);
  bind_codec(m);
  bind_crossing(m);
  bind_transport(m);
  bind_works_and_windows(m);
  bind_group(m);
  bind_backend_table(m);
  bind_call(m);
  bind_cuda(m);
  bind_mem_pool(m);
  bind_optim(m);
  bind_step_description(m);
  bind_sharded(m);
  m.attr("dtypes") = numbers<DType>();
  m.attr("elements") = element_names();
  m.attr("reduce_ops") = numbers<ReduceOp>();
  m.attr("algorithms") = numbers<Algorithm>();
  m.attr("codecs") = numbers<CodecKind>();
  m.attr("rules") = numbers<Rule>();
  m.attr("coded_algorithms") = algorithms_with(&Algorithms::coded);
  m.attr("partial_sum_algorithms") = algorithms_with(&Algorithms::partial_sums);
  m.attr("zero_copy_algorithms") = algorithms_with(&Algorithms::allows_zero_copy);
}

}  // namespace pycomm::bind

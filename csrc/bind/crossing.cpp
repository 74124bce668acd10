// Python binding of the floors of collectives, for pycomm.bench.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/gil.h"
#include "bind/python.h"
#include "core/timeout.h"
#include "cpu/executor/crossing.h"

namespace py = pybind11;

namespace pycomm::bind {
namespace {

using cpu::Crossing;
using cpu::Route;

std::unique_ptr<Crossing> make_crossing(Route route, const std::vector<std::uintptr_t>& flags,
                                        const std::vector<std::uintptr_t>& slots, int rank,
                                        std::int64_t bytes, std::int64_t tile) {
  PYCOMM_CHECK(flags.size() == slots.size(), "flags and slots must have an entry for each rank");
  std::vector<Crossing::Place> places;
  for (std::size_t r = 0; r < flags.size(); ++r) {
    places.push_back(
        {reinterpret_cast<Crossing::Flag*>(flags[r]), reinterpret_cast<std::byte*>(slots[r])});
  }
  return std::make_unique<Crossing>(route, std::move(places), rank, bytes, tile);
}

}  // namespace

void bind_crossing(py::module_& m) {
  py::class_<Crossing> crossing(m, "Crossing");
  py::enum_<Route>(crossing, "Route")
      .value("one_shot", Route::one_shot)
      .value("two_shot", Route::two_shot)
      .value("reduce_scatter", Route::reduce_scatter)
      .value("all_gather", Route::all_gather)
      .value("broadcast", Route::broadcast)
      .value("two_shot_window", Route::two_shot_window)
      .value("reduce_scatter_window", Route::reduce_scatter_window)
      .value("all_gather_push", Route::all_gather_push)
      .value("all_gather_pull", Route::all_gather_pull)
      .value("broadcast_pull", Route::broadcast_pull)
      .value("broadcast_share", Route::broadcast_share);
  crossing.attr("flag_bytes") = Crossing::kFlagBytes;
  crossing.attr("turns") = Crossing::kTurns;
  crossing
      .def(py::init(&make_crossing), py::arg("route"), py::arg("flags"), py::arg("slots"),
           py::arg("rank"), py::arg("bytes"), py::arg("tile"))
      .def(
          "run",
          [](Crossing& crossing, std::uintptr_t input, std::uintptr_t output, double timeout) {
            const WithoutGil no_gil;
            crossing.run(reinterpret_cast<const std::byte*>(input),
                         reinterpret_cast<std::byte*>(output), timeout_of(timeout));
          },
          py::arg("input"), py::arg("output"), py::arg("timeout"));
}

}  // namespace pycomm::bind

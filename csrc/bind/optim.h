// What the bindings of optimizer steps share.
#pragma once

#include <pybind11/pybind11.h>

#include <span>

#include "core/errors.h"
#include "core/optim/segment.h"
#include "cpu/optim/step.h"

namespace pycomm::bind {

// Runs on torch's own threads, as many as torch has been told to use. A second thread pool would
// compete with them for the cores.
void torch_parallel(std::int64_t n, const cpu::Body& body);

// A table of segments or shards, which Python fills in as 64-bit words.
template <class Row>
std::span<const Row> rows_of(const pybind11::buffer_info& info) {
  PYCOMM_CHECK(info.itemsize == 8 && info.ndim == 1 && info.strides[0] == 8,
               "table must be a row of 64-bit words");
  const auto bytes = static_cast<std::size_t>(info.size) * 8;
  PYCOMM_CHECK(bytes % sizeof(Row) == 0, "table must hold whole rows");
  return {static_cast<const Row*>(info.ptr), bytes / sizeof(Row)};
}

inline StepControl control(std::uintptr_t grad_scale, std::uintptr_t found_inf,
                           std::uintptr_t clip) {
  return {reinterpret_cast<const float*>(grad_scale), reinterpret_cast<float*>(found_inf),
          reinterpret_cast<float*>(clip)};
}

}  // namespace pycomm::bind

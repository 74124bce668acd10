#include "cpu/codecs/coded_comm.h"

#include <algorithm>
#include <cstring>

#include "core/codecs/cast.h"
#include "cpu/internode/link.h"

namespace pycomm::cpu {
namespace {

void copy_state(float* to, const float* from, std::int64_t n) {
  if (to != nullptr && from != nullptr && n > 0) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  }
}

const std::byte* element(const Operation& operation, const Call& call, std::int64_t index) {
  return static_cast<const std::byte*>(call.input) + index * size_of(operation.dtype);
}

}  // namespace

bool is_unused(const Operation& operation, const Call& call, std::span<const Range> parts) {
  return call.feedback.hold_unused && std::ranges::all_of(parts, [&](const Range& part) {
           return all_zero(operation.dtype, element(operation, call, part.begin), part.count);
         });
}

void snapshot_residuals(const Call& call, int ranks) {
  const Feedback& feedback = call.feedback;
  const std::int64_t n = reduced_elements(call.operation, ranks);
  copy_state(feedback.residual_before, feedback.residual, n);
  copy_state(feedback.velocity_before, feedback.velocity, n);
}

void put_back(const Call& call, int ranks) {
  const Feedback& feedback = call.feedback;
  const std::int64_t n = reduced_elements(call.operation, ranks);
  copy_state(feedback.residual, feedback.residual_before, n);
  copy_state(feedback.velocity, feedback.velocity_before, n);
}

Preflight preflight_of(const Operation& operation, const Call& call, float limit,
                       std::span<const Range> parts) {
  if (call.feedback.residual == nullptr) return {};
  const CodecLoops loops = codec_loops(operation.dtype, operation.codec);
  const float scale = scaling_of(call.feedback).scale;
  std::uint32_t largest = 0;
  for (const Range& part : parts) {
    largest =
        std::max(largest, loops.largest(element(operation, call, part.begin),
                                        call.feedback.residual + part.begin, scale, part.count));
  }
  return make_preflight(largest > magnitude(limit), is_unused(operation, call, parts));
}

template <class Base>
CodedComm<Base>::CodedComm(Base& comm, const Operation& operation, const Feedback& feedback,
                           float limit, const CodedStaging& staging, const CodecLoops& loops)
    : comm_(comm),
      operation_(operation),
      feedback_(feedback),
      limit_(limit),
      scaling_(scaling_of(feedback)),
      loops_(loops),
      staging_(staging),
      sources_(static_cast<std::size_t>(comm.size()) + 1) {}

template <class Base>
Source CodedComm<Base>::source(Location location, std::int64_t n) {
  if (location.coded == kPlain) {
    own_ = index(location, input().data);
    return {{location.data, nullptr}, true};
  }
  if (location.rank != rank()) comm_.count_in(encoded_bytes(n));
  return {staging_[location], false};
}

template <class Base>
Pass CodedComm<Base>::pass_over(int n_from, std::int64_t n, bool last) const {
  Pass pass;
  pass.from = sources_.data();
  pass.n_from = n_from;
  pass.last = last;
  pass.divisor =
      last && operation_.op == ReduceOp::avg ? static_cast<float>(comm_.contributors()) : 1.0f;
  pass.n = n;
  pass.scaling = scaling_;
  if (preflight_.overflow != 0) pass.limit = limit_;
  return pass;
}

template <class Base>
void CodedComm<Base>::sum(Location output, int n_from, std::int64_t n, bool last) {
  Pass pass = pass_over(n_from, n, last);
  pass.output = output.data;
  if (operation_.dtype != DType::f32) {  // rounding loses nothing otherwise
    const std::int64_t element = index(output, this->output().data);
    pass.residual = residual_of(rank() * block() + element);  // the output is this rank's block
  }
  nonfinite_ |= loops_.sum(pass, staging_.block);
}

template <class Base>
void CodedComm<Base>::encode(Location to, Location output, int n_from, std::int64_t n, bool last) {
  Pass pass = pass_over(n_from, n, last);
  pass.to = staging_[to];
  std::int64_t element = own_;
  if (output.coded == kPlain) {
    pass.output = output.data;
    element = index(output, this->output().data);
  }
  pass.residual = residual_of(element);
  pass.random = {feedback_.seed, feedback_.step, last ? kResultStream : comm_.stream()};
  pass.first = first_element(operation_) + element;
  nonfinite_ |= loops_.encode(pass, staging_.block);
}

template <class Base>
void CodedComm<Base>::copy(Location to, Location from, std::int64_t n) {
  if (n == 0 || (to.data == from.data && to.coded == from.coded)) return;
  if (from.coded == kPlain) {
    sources_[0] = source(from, n);
    encode(to, to, 1, n, false);
    return;
  }
  if (from.rank != rank()) comm_.count_in(encoded_bytes(n));
  const Encoded source = staging_[from];
  if (to.coded == kPlain) {
    nonfinite_ |= loops_.decode(source, to.data, n, staging_.block);
    return;
  }
  const Encoded target = staging_[to];
  std::memcpy(target.payload, source.payload, static_cast<std::size_t>(n * staging_.payload));
  if (loops_.scaled) {
    std::memcpy(target.scales, source.scales,
                static_cast<std::size_t>(ceil_div(n, staging_.block) * 4));
  }
}

// All other functions that algorithms instantiate are in the header.
#define PYCOMM_INSTANTIATE(Base)                                                       \
  template CodedComm<Base>::CodedComm(Base&, const Operation&, const Feedback&, float, \
                                      const CodedStaging&, const CodecLoops&);         \
  template Source CodedComm<Base>::source(Location, std::int64_t);                     \
  template void CodedComm<Base>::encode(Location, Location, int, std::int64_t, bool);  \
  template void CodedComm<Base>::sum(Location, int, std::int64_t, bool);               \
  template void CodedComm<Base>::copy(Location, Location, std::int64_t)
PYCOMM_INSTANTIATE(Comm);
PYCOMM_INSTANTIATE(Link);
#undef PYCOMM_INSTANTIATE

}  // namespace pycomm::cpu

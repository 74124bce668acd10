#include "cpu/codecs/coded_comm.h"

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

}  // namespace

bool is_unused(const Call& call) {
  return call.feedback.hold_unused &&
         all_zero(call.operation.dtype, call.input, call.operation.count);
}

void snapshot_residuals(const Call& call) {
  const Feedback& feedback = call.feedback;
  copy_state(feedback.residual_before, feedback.residual, call.operation.count);
  copy_state(feedback.velocity_before, feedback.velocity, call.operation.count);
}

void put_back(const Call& call) {
  const Feedback& feedback = call.feedback;
  copy_state(feedback.residual, feedback.residual_before, call.operation.count);
  copy_state(feedback.velocity, feedback.velocity_before, call.operation.count);
}

Preflight preflight_of(const Operation& operation, const Call& call, float limit) {
  if (call.feedback.residual == nullptr) return {};
  const CodecLoops loops = codec_loops(operation.dtype, operation.codec);
  const std::uint32_t largest = loops.largest(call.input, call.feedback.residual,
                                              scaling_of(call.feedback).scale, operation.count);
  return make_preflight(largest > magnitude(limit), is_unused(call));
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
void CodedComm<Base>::encode(Location to, Location output, int n_from, std::int64_t n, bool last) {
  Pass pass;
  pass.from = sources_.data();
  pass.n_from = n_from;
  pass.to = staging_[to];
  pass.last = last;
  pass.divisor =
      last && operation_.op == ReduceOp::avg ? static_cast<float>(comm_.contributors()) : 1.0f;
  pass.n = n;
  std::int64_t element = own_;
  if (output.coded == kPlain) {
    pass.output = output.data;
    element = index(output, this->output().data);
  }
  if (feedback_.residual != nullptr && preflight_.unused == 0)
    pass.residual = feedback_.residual + element;
  pass.scaling = scaling_;
  if (preflight_.overflow != 0) pass.limit = limit_;
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

// What an algorithm instantiates besides is in the header.
#define PYCOMM_INSTANTIATE(Base)                                                       \
  template CodedComm<Base>::CodedComm(Base&, const Operation&, const Feedback&, float, \
                                      const CodedStaging&, const CodecLoops&);         \
  template Source CodedComm<Base>::source(Location, std::int64_t);                     \
  template void CodedComm<Base>::encode(Location, Location, int, std::int64_t, bool);  \
  template void CodedComm<Base>::copy(Location, Location, std::int64_t)
PYCOMM_INSTANTIATE(Comm);
PYCOMM_INSTANTIATE(Link);
#undef PYCOMM_INSTANTIATE

}  // namespace pycomm::cpu

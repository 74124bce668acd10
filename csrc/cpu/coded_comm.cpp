#include "cpu/coded_comm.h"

#include <cstring>

#include "core/cast.h"

namespace pycomm::cpu {

bool is_unused(const Call& call) {
  return call.feedback.hold_unused &&
         all_zero(call.operation.dtype, call.input, call.operation.count);
}

Outlook outlook_of(const Operation& operation, const Call& call, int ranks) {
  if (call.feedback.residual == nullptr) return {};
  const CodecLoops loops = codec_loops(operation.dtype, operation.codec);
  const std::uint32_t largest = loops.largest(call.input, call.feedback.residual,
                                              scaling_of(call.feedback).scale, operation.count);
  return make_outlook(largest > safe_magnitude(operation, ranks), is_unused(call));
}

CodedComm::CodedComm(Comm& comm, const Operation& operation, const Feedback& feedback)
    : comm_(comm),
      operation_(operation),
      feedback_(feedback),
      scaling_(scaling_of(feedback)),
      loops_(codec_loops(operation.dtype, operation.codec)),
      staging_(CodedStaging::in(comm.slot_bytes() * kStagingSlots, operation.codec)),
      piece_(staging_.piece(comm.size())),
      sources_(static_cast<std::size_t>(comm.size()) + 1) {}

Source CodedComm::source(Place place, std::int64_t n) {
  if (place.coded == kPlain) {
    own_ = index(place, input().data);
    return {{place.data, nullptr}, true};
  }
  if (place.rank != rank()) comm_.count_in(encoded_bytes(n));
  return {staging_[place], false};
}

void CodedComm::encode(Place to, Place output, int n_from, std::int64_t n, bool last) {
  Pass pass;
  pass.from = sources_.data();
  pass.n_from = n_from;
  pass.to = staging_[to];
  pass.last = last;
  pass.divisor = last && operation_.op == ReduceOp::avg ? static_cast<float>(size()) : 1.0f;
  pass.n = n;
  std::int64_t element = own_;
  if (output.coded == kPlain) {
    pass.output = output.data;
    element = index(output, this->output().data);
  }
  if (feedback_.residual != nullptr && !unused_) pass.residual = feedback_.residual + element;
  pass.scaling = scaling_;
  pass.keep_residual = overflow_;
  pass.random = {feedback_.seed, feedback_.step,
                 last ? kResultStream : static_cast<std::uint32_t>(rank())};
  pass.first = first_element(operation_) + element;
  nonfinite_ |= loops_.encode(pass, staging_.block);
}

void CodedComm::copy(Place to, Place from, std::int64_t n) {
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

}  // namespace pycomm::cpu

#include "cpu/coded_comm.h"

#include <cstring>

#include "core/cast.h"

namespace pycomm::cpu {

bool overflows(const Operation& operation, int ranks, const void* input, const float* residual) {
  const CodecLoops loops = codec_loops(operation.dtype, operation.codec);
  return loops.largest(input, residual, operation.count) > safe_magnitude(operation, ranks);
}

CodedComm::CodedComm(Comm& comm, const Operation& operation, const Feedback& feedback)
    : comm_(comm),
      operation_(operation),
      feedback_(feedback),
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
  if (feedback_.residual != nullptr) pass.residual = feedback_.residual + element;
  pass.keep_residual = keep_residual_;
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

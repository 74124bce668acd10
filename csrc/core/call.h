// An operation together with its buffers, as a caller passes it to an executor.
#pragma once

#include "core/codecs/feedback.h"
#include "core/details.h"
#include "core/operation.h"
#include "core/timeout.h"

namespace pycomm {

// The blocks of a tensor that has one per rank, if they do not follow each other or differ in size.
// The arrays have an entry per rank and must live until the operation has ended.
struct Blocks {
  const void* const* addresses = nullptr;  // null: they follow each other in the call's tensor
  // In elements of the caller's type (core/elements.h). Null: Operation::count. Otherwise the
  // executor sets Operation::count.
  const std::int64_t* counts = nullptr;

  explicit operator bool() const { return addresses != nullptr || counts != nullptr; }
};

namespace cpu {
class CustomOperation;  // cpu/executor/custom_operation.h
}

struct Call {
  Operation operation;
  const void* input = nullptr;
  void* output = nullptr;
  Feedback feedback = {};
  Details details = {};  // only shape and label; details_of() adds the rest
  // reduce_scatter, scatter (on the root) and all_to_all have blocks of inputs; all_gather, gather (on
  // the root) and all_to_all have blocks of outputs. Gather and scatter have no counts; all_to_all
  // has the counts of both or of neither.
  Blocks inputs = {};
  Blocks outputs = {};
  cpu::CustomOperation* body =
      nullptr;         // on the CPU: of an operation that none in core/algorithms/run.h is
  double timeout = 0;  // in seconds; 0 for the group's, which is the only one on CUDA
};

// Why no executor can run a call among `ranks` ranks; empty if one may.
inline std::string refusal_of(const Call& call, int ranks) {
  const Operation& operation = call.operation;
  if (is_bitwise(operation.op) && operation.dtype != DType::u8) {
    return std::string("bitwise reductions must be carried as bytes, got ") +
           name_of(operation.dtype);
  }
  if (operation.codec.kind == CodecKind::topk && operation.collective != Collective::all_reduce) {
    return std::string("top-k is for all_reduce, got ") + name_of(operation.collective);
  }
  if (operation.algorithm == Algorithm::multicast && !adds_in_switch(operation)) {
    return std::string(
               "algorithm=multicast is for sum and avg of float32, float16 and bfloat16, which "
               "switches add, got ") +
           name_of(operation.op) + " of " + name_of(operation.dtype);
  }
  if (operation.root < 0 || operation.root >= ranks) {
    return "root must be a rank from 0 to " + std::to_string(ranks - 1) + ", got " +
           std::to_string(operation.root);
  }
  if (call.timeout != 0 && !is_timeout(call.timeout)) {
    return "timeout must be positive and at most " + std::to_string(kMostSeconds) + " s, got " +
           std::to_string(call.timeout);
  }
  if (operation.collective == Collective::all_to_all && operation.count > 0 &&
      call.input == call.output && call.input != nullptr) {
    return "output must be another tensor than input in an all_to_all";
  }
  return {};
}

// The parts of a call that change its result, so that ranks must agree on them: of compression, and
// the sizes of blocks. Not included: the scale, which lies in the executor's memory, and
// Feedback::hold_unused, which goes with the operation's tag.
inline Details details_of(const Call& call, int ranks) {
  Details details = call.details;
  const std::int64_t* const counts =
      call.inputs.counts != nullptr ? call.inputs.counts : call.outputs.counts;
  if (counts != nullptr) {
    const bool each_its_own = call.operation.collective == Collective::all_to_all;
    each_its_own ? details.set_own_counts() : details.set_counts(counts, ranks);
  }
  const Feedback& feedback = call.feedback;
  if (call.operation.codec.stochastic != 0) {
    details.seed = feedback.seed;
    details.step = feedback.step;
  }
  if (feedback.velocity != nullptr) details.momentum = feedback.momentum;
  return details;
}

}  // namespace pycomm

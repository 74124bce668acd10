#include "cpu/internode/aggregate.h"

#include <algorithm>

#include "core/algorithms/two_shot.h"
#include "core/codecs/cast.h"
#include "core/codecs/feedback.h"
#include "cpu/executor/loops.h"
#include "cpu/internode/stages.h"

namespace pycomm::cpu {
namespace {

// Consecutive elements that one node owns: where they begin in the tensor and, `packed`, among the
// elements of the stripe.
struct Run {
  std::int64_t begin;
  std::int64_t packed;
  std::int64_t count;
  std::int64_t owner;
};

// Calls visit(run) for the tensor's runs in stripe s, in order.
template <class Visit>
void each_run(const Operation& operation, const StripeInterleave& interleave, int s, Visit visit) {
  const std::int64_t first = first_element(operation), owned = owned_elements(operation.codec);
  const std::int64_t skipped = interleave.before(first, s);
  for (std::int64_t begin = 0; begin < operation.count;) {
    const std::int64_t index = first + begin;
    const std::int64_t next = std::min((index / owned + 1) * owned - first, operation.count);
    if (index / interleave.length % interleave.stripes == s) {
      visit(Run{begin, interleave.before(index, s) - skipped, next - begin,
                index % interleave.length / owned});
    }
    begin = next;
  }
}

void copy_floats(float* to, const float* from, std::int64_t n) {
  copy({reinterpret_cast<std::byte*>(to), false}, reinterpret_cast<const std::byte*>(from),
       n * static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace

const float* widened(DType dtype, const void* x, std::int64_t n, Scratch& copy) {
  if (dtype == DType::f32) return static_cast<const float*>(x);
  float* const wide = copy.floats(n);
  Codec codec;
  codec.kind = CodecKind::cast;
  codec.values = dtype;
  const Encoded narrow{static_cast<std::byte*>(const_cast<void*>(x)), nullptr};
  codec_loops(DType::f32, codec).decode(narrow, wide, n, kSmallestBlock);
  return wide;
}

NodeAggregate::NodeAggregate(Comm& comm, const Nodes& nodes, AggregateMemory& memory,
                             const Operation& operation, const Call& call)
    : comm_(comm),
      nodes_(nodes),
      wide_(memory.wide),
      operation_(operation),
      call_(call),
      interleave_(interleave_of(operation.codec, nodes)),
      tile_ranges_(tile_ranges_of(operation, interleave_, nodes.count())),
      carried_(operation),
      carried_call_(call) {
  const std::int64_t n = operation.count;
  const auto sums = [&](const float* mine, Scratch& to) {
    return mine == nullptr ? nullptr : to.floats(packed(n));
  };
  gradient_ = memory.gradient.floats(packed(n));
  carried_call_.input = carried_call_.output = gradient_;
  Feedback& feedback = carried_call_.feedback;
  feedback.residual = sums(call.feedback.residual, memory.residual);
  feedback.velocity = sums(call.feedback.velocity, memory.velocity);
  if (owns_stripe()) carried_ = carried_by(operation, nodes, comm_.rank());
}

// The number of this rank's stripe's elements that come before element `begin` of the tensor.
std::int64_t NodeAggregate::packed(std::int64_t begin) const {
  if (!owns_stripe()) return 0;
  const std::int64_t first = first_element(operation_);
  return interleave_.before(first + begin, comm_.rank()) - interleave_.before(first, comm_.rank());
}

// An operation among the ranks of this node, on a range of the tensor.
Operation NodeAggregate::operation_on(const Range& range, DType dtype) const {
  Operation phase = operation_;
  phase.algorithm = Algorithm::two_shot;
  phase.op = ReduceOp::sum;
  phase.codec = {};
  phase.dtype = dtype;
  phase.count = range.count;
  phase.offset += static_cast<std::uint32_t>(range.begin / kSmallestBlock);
  return phase;
}

void NodeAggregate::collect_first() {
  if (call_.feedback.residual == nullptr && operation_.codec.kind != CodecKind::topk) return;
  for (std::int64_t t = 0; t < tile_ranges_.tiles(); ++t) collect_tile(t);
  complete_ = true;
}

void NodeAggregate::collect_tile(std::int64_t t) {
  const Range range = tile_ranges_[t];
  const Feedback &mine = call_.feedback, &sums = carried_call_.feedback;
  const std::byte* const input =
      static_cast<const std::byte*>(call_.input) + range.begin * size_of(operation_.dtype);
  fold(range, widened(operation_.dtype, input, range.count, wide_), gradient_);
  if (mine.residual != nullptr) fold(range, mine.residual + range.begin, sums.residual);
  if (mine.velocity != nullptr) fold(range, mine.velocity + range.begin, sums.velocity);
}

void NodeAggregate::fold(const Range& range, const float* mine, float* sums) {
  float* const to = sums + packed(range.begin);
  if (comm_.size() == 1) {
    return copy_floats(to, mine, range.count);
  }
  const Operation sum = operation_on(range, DType::f32);
  comm_.begin_phase(sum, mine, to);
  const CyclicStripes<Comm> stripes{comm_, interleave_, first_element(sum), true};
  PYCOMM_CHECK(stripes.piece() * interleave_.stripes <= comm_.slot_count(),
               "staging_bytes is too small to compress in " + std::to_string(interleave_.stripes) +
                   " stripes");
  pycomm::reduce_scatter(comm_, stripes);
}

Preflight NodeAggregate::spread(std::int64_t t, Preflight mine) {
  const Range range = tile_ranges_[t];
  nonfinite_ = narrow(range) || nonfinite_;
  mine.nonfinite |= static_cast<std::uint8_t>(nonfinite_);
  if (comm_.size() == 1) return mine;
  const Operation phase = operation_on(range, operation_.dtype);
  std::byte* const output =
      static_cast<std::byte*>(call_.output) + range.begin * size_of(operation_.dtype);
  comm_.begin_phase(phase, output, output, mine);
  pycomm::all_gather(comm_, CyclicStripes<Comm>{comm_, interleave_, first_element(phase), false});
  return comm_.preflight();
}

bool NodeAggregate::narrow(const Range& range) {
  if (!owns_stripe()) return false;
  float* const residual = carried_call_.feedback.residual;
  const float divisor = operation_.op == ReduceOp::avg ? static_cast<float>(nodes_.world()) : 1.0f;
  const float factor = divisor * scaling_of(call_.feedback).inverse;
  Operation phase = operation_on(range, operation_.dtype);
  phase.codec = operation_.codec;  // determines the owners
  const std::int64_t before = packed(range.begin);
  std::uint32_t largest = 0;
  const NarrowLoop narrow = narrow_loop(operation_.dtype);
  each_run(phase, interleave_, comm_.rank(), [&](const Run& run) {
    const bool own = residual != nullptr && run.owner == nodes_.here;
    const std::int64_t at = before + run.packed;
    std::byte* const output = static_cast<std::byte*>(call_.output) +
                              (range.begin + run.begin) * size_of(operation_.dtype);
    largest = std::max(
        largest, narrow(gradient_ + at, output, run.count, own ? residual + at : nullptr, factor));
  });
  return largest >= kInfinityBits;
}

void NodeAggregate::store_feedback() const {
  store_feedback(carried_call_.feedback.residual, call_.feedback.residual);
  store_feedback(carried_call_.feedback.velocity, call_.feedback.velocity);
}

// This rank keeps the values of the stripe that it carries; those of the other stripes become zero.
void NodeAggregate::store_feedback(const float* carried, float* state) const {
  if (state == nullptr) return;
  zero(state, operation_.count);
  if (!owns_stripe()) return;
  each_run(operation_, interleave_, comm_.rank(), [&](const Run& run) {
    copy_floats(state + run.begin, carried + run.packed, run.count);
  });
}

}  // namespace pycomm::cpu

#include "cpu/internode/aggregate.h"

#include <algorithm>

#include "core/algorithms/two_shot.h"
#include "core/codecs/cast.h"
#include "core/codecs/feedback.h"
#include "cpu/internode/stages.h"
#include "cpu/loops.h"

namespace pycomm::cpu {
namespace {

std::int64_t owned_elements(const Codec& codec) {
  return codec.kind == CodecKind::topk ? kTopkChunk : kOwnedElements;
}

// A run of elements that one machine owns: from where on, also among those of the stripe alone.
struct Run {
  std::int64_t begin;
  std::int64_t packed;
  std::int64_t count;
  std::int64_t owner;
};

// Visits the runs of a tensor that are in stripe s, in order.
template <class Visit>
void each_run(const Operation& operation, const Cycles& cycles, int s, Visit visit) {
  const std::int64_t first = first_element(operation), owned = owned_elements(operation.codec);
  const std::int64_t skipped = cycles.before(first, s);
  for (std::int64_t begin = 0; begin < operation.count;) {
    const std::int64_t index = first + begin;
    const std::int64_t next = std::min((index / owned + 1) * owned - first, operation.count);
    if (index / cycles.length % cycles.stripes == s) {
      visit(Run{begin, cycles.before(index, s) - skipped, next - begin,
                index % cycles.length / owned});
    }
    begin = next;
  }
}

void copy_floats(float* to, const float* from, std::int64_t n) {
  copy({reinterpret_cast<std::byte*>(to), false}, reinterpret_cast<const std::byte*>(from),
       n * static_cast<std::int64_t>(sizeof(float)));
}

}  // namespace

Pool::Pool(Comm& comm, const Machines& machines, PoolMemory& memory, const Operation& operation,
           const Call& call)
    : comm_(comm),
      machines_(machines),
      wide_(memory.wide),
      operation_(operation),
      call_(call),
      cycles_{machines.count() * owned_elements(operation.codec), machines.stripes()},
      stretches_(stretches_of(operation, cycles_, machines.count())),
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
  if (!carries()) return;
  carried_.dtype = DType::f32;
  carried_.count = packed(n);
  carried_.offset = static_cast<std::uint32_t>(
      cycles_.before(first_element(operation), comm_.rank()) / kSmallestBlock);
  if (n > 0) {
    // Both counts are less than 2^32.
    const std::uint64_t k = operation.codec.k;
    const auto all = k * static_cast<std::uint64_t>(carried_.count), whole = std::uint64_t(n);
    carried_.codec.k = static_cast<std::uint32_t>(all / whole + (all % whole != 0 ? 1 : 0));
  }
}

// How many elements of this rank's stripe come before one of the tensor's.
std::int64_t Pool::packed(std::int64_t begin) const {
  if (!carries()) return 0;
  const std::int64_t first = first_element(operation_);
  return cycles_.before(first + begin, comm_.rank()) - cycles_.before(first, comm_.rank());
}

// An operation inside the machine.
Operation Pool::stretch_of(const Range& range, DType dtype) const {
  Operation stretch = operation_;
  stretch.algorithm = Algorithm::two_shot;
  stretch.op = ReduceOp::sum;
  stretch.codec = {};
  stretch.dtype = dtype;
  stretch.count = range.count;
  stretch.offset += static_cast<std::uint32_t>(range.begin / kSmallestBlock);
  return stretch;
}

void Pool::collect_first() {
  if (call_.feedback.residual == nullptr && operation_.codec.kind != CodecKind::topk) return;
  for (std::int64_t t = 0; t < stretches_.tiles(); ++t) collect_tile(t);
  complete_ = true;
}

void Pool::collect_tile(std::int64_t t) {
  const Range range = stretches_[t];
  const Feedback &mine = call_.feedback, &sums = carried_call_.feedback;
  fold(range, widened(range), gradient_);
  if (mine.residual != nullptr) fold(range, mine.residual + range.begin, sums.residual);
  if (mine.velocity != nullptr) fold(range, mine.velocity + range.begin, sums.velocity);
}

void Pool::fold(const Range& range, const float* mine, float* sums) {
  float* const to = sums + packed(range.begin);
  if (comm_.size() == 1) {
    return copy_floats(to, mine, range.count);
  }
  const Operation sum = stretch_of(range, DType::f32);
  comm_.begin_phase(sum, mine, to);
  const CyclicStripes<Comm> stripes{comm_, cycles_, first_element(sum), true};
  PYCOMM_CHECK(
      stripes.piece() * cycles_.stripes <= comm_.slot_count(),
      "staging_bytes is too small to compress in " + std::to_string(cycles_.stripes) + " stripes");
  pycomm::reduce_scatter(comm_, stripes);
}

const float* Pool::widened(const Range& range) {
  const std::byte* const input =
      static_cast<const std::byte*>(call_.input) + range.begin * size_of(operation_.dtype);
  if (operation_.dtype == DType::f32) return reinterpret_cast<const float*>(input);
  float* const wide = wide_.floats(range.count);
  Codec codec;
  codec.kind = CodecKind::cast;
  codec.values = operation_.dtype;
  const Encoded narrow{const_cast<std::byte*>(input), nullptr};
  codec_loops(DType::f32, codec).decode(narrow, wide, range.count, kSmallestBlock);
  return wide;
}

Outlook Pool::spread(std::int64_t t, Outlook mine) {
  const Range range = stretches_[t];
  nonfinite_ = narrow(range) || nonfinite_;
  if (nonfinite_ && mine.overflow == 0) mine.overflow = kNonfinite;
  if (comm_.size() == 1) return mine;
  const Operation stretch = stretch_of(range, operation_.dtype);
  std::byte* const output =
      static_cast<std::byte*>(call_.output) + range.begin * size_of(operation_.dtype);
  comm_.begin_phase(stretch, output, output, mine);
  pycomm::all_gather(comm_, CyclicStripes<Comm>{comm_, cycles_, first_element(stretch), false});
  return comm_.outlook();
}

bool Pool::narrow(const Range& range) {
  if (!carries()) return false;
  float* const residual = carried_call_.feedback.residual;
  const float divisor =
      operation_.op == ReduceOp::avg ? static_cast<float>(machines_.world()) : 1.0f;
  const float factor = divisor * scaling_of(call_.feedback).inverse;
  Operation stretch = stretch_of(range, operation_.dtype);
  stretch.codec = operation_.codec;  // says who owns what
  const std::int64_t before = packed(range.begin);
  std::uint32_t largest = 0;
  const NarrowLoop narrow = narrow_loop(operation_.dtype);
  each_run(stretch, cycles_, comm_.rank(), [&](const Run& run) {
    const bool own = residual != nullptr && run.owner == machines_.here;
    const std::int64_t at = before + run.packed;
    std::byte* const output = static_cast<std::byte*>(call_.output) +
                              (range.begin + run.begin) * size_of(operation_.dtype);
    largest = std::max(
        largest, narrow(gradient_ + at, output, run.count, own ? residual + at : nullptr, factor));
  });
  return largest >= kInfinityBits;
}

void Pool::keep() const {
  keep(carried_call_.feedback.residual, call_.feedback.residual);
  keep(carried_call_.feedback.velocity, call_.feedback.velocity);
}

// This rank has what it carries, and nothing of the other stripes.
void Pool::keep(const float* carried, float* state) const {
  if (state == nullptr) return;
  zero(state, operation_.count);
  if (!carries()) return;
  each_run(operation_, cycles_, comm_.rank(), [&](const Run& run) {
    copy_floats(state + run.begin, carried + run.packed, run.count);
  });
}

}  // namespace pycomm::cpu

#include "cpu/hosts.h"

#include <cstring>

#include "core/cast.h"
#include "core/run.h"

namespace pycomm::cpu {
namespace {

// Bits of Outlook::overflow in the last phase of a compressed operation: residuals are untouched; or
// a value was not finite nevertheless.
constexpr std::uint16_t kUntouched = 1, kNonfinite = 2;

// What a rank says that has nothing to say.
constexpr Outlook kIndifferent = make_outlook(false, true);

void move(void* to, const void* from, std::int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

std::int64_t turn_of(const Codec& codec) {
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
  const std::int64_t first = first_element(operation), turn = turn_of(operation.codec);
  const std::int64_t skipped = cycles.before(first, s);
  for (std::int64_t begin = 0; begin < operation.count;) {
    const std::int64_t index = first + begin;
    const std::int64_t next = std::min((index / turn + 1) * turn - first, operation.count);
    if (index / cycles.length % cycles.stripes == s) {
      visit(Run{begin, cycles.before(index, s) - skipped, next - begin,
                index % cycles.length / turn});
    }
    begin = next;
  }
}

// Rounds to the tensor's type; what that loses goes into `lost_there`, if there is any. Whether
// something is not finite.
bool narrow(DType dtype, const float* from, void* to, std::int64_t n, float* lost_there,
            float factor) {
  bool finite = true;
  visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (std::is_same_v<accumulator_t<T>, float>) {
      for (std::int64_t i = 0; i < n; ++i) {
        const T stored = store<T>(from[i]);
        std::memcpy(static_cast<std::byte*>(to) + i * static_cast<std::int64_t>(sizeof(T)), &stored,
                    sizeof(T));
        finite = finite && magnitude(load(stored)) < kInfinityBits;
        if (lost_there != nullptr) lost_there[i] += lost(from[i], load(stored), factor);
      }
    }
  });
  return !finite;
}

}  // namespace

Hosts::Hosts(Comm& comm, Machines machines, std::shared_ptr<Transport> transport,
             Clock::duration timeout)
    : comm_(comm), machines_(std::move(machines)), topk_(nullptr) {
  if (transport != nullptr) {
    link_ = std::make_unique<Link>(comm, std::move(transport), machines_, timeout);
  }
}

bool Hosts::run(const Operation& operation, const Call& call, void (*interrupt)()) {
  begin(operation, interrupt);
  if (operation.codec.kind != CodecKind::none) return compressed(operation, call);
  if (carries()) link_->publish();
  switch (operation.collective) {
    case Collective::all_reduce:
      all_reduce(operation, call);
      break;
    case Collective::reduce_scatter:
      reduce_scatter(operation, call);
      break;
    case Collective::all_gather:
      all_gather(operation, call);
      break;
    case Collective::broadcast:
      broadcast(operation, call);
      break;
    case Collective::barrier:
      barrier(operation);
  }
  return false;
}

// The ranks of this machine agree on what follows.
void Hosts::begin(const Operation& operation, void (*interrupt)()) {
  comm_.begin(operation, nullptr, nullptr, interrupt);
  comm_.announce();
  if (carries()) link_->begin(interrupt);
}

// Inside the machine, a tensor of so many elements.
Operation Hosts::phase(const Operation& operation, std::int64_t count) const {
  Operation phase = operation;
  phase.collective = Collective::all_reduce;
  phase.algorithm = Algorithm::two_shot;
  phase.codec = {};
  phase.count = count;
  return phase;
}

Range Hosts::stripe(const Operation& operation, std::int64_t begin, std::int64_t count) const {
  const std::int64_t line = kLine / size_of(operation.dtype);
  const Range part = part_of(count, machines_.stripes(), comm_.rank(), line);
  return {begin + part.begin, part.count};
}

// Leaves the machine's own sum of this rank's stripe in its place in the output.
void Hosts::reduce_to_stripes(const Operation& operation, std::int64_t count, const void* input,
                              void* output) {
  if (comm_.size() == 1) return move(output, input, count * size_of(operation.dtype));
  comm_.begin_phase(phase(operation, count), input, output);
  pycomm::reduce_scatter(comm_, EvenStripes<Comm>{comm_, machines_.stripes()}, false);
}

void Hosts::gather_stripes(const Operation& operation, std::int64_t count, void* data) {
  if (comm_.size() == 1) return;
  comm_.begin_phase(phase(operation, count), data, data);
  pycomm::all_gather(comm_, EvenStripes<Comm>{comm_, machines_.stripes()});
}

void Hosts::exchange_plain(const Operation& operation, PlainPart::Work work) {
  if (!carries()) return;
  link_->meet();
  PlainPart part(*link_, operation, std::move(work), incoming_);
  exchange(*link_, part);
}

void Hosts::all_reduce(const Operation& operation, const Call& call) {
  reduce_to_stripes(operation, operation.count, call.input, call.output);
  const Range mine = stripe(operation, 0, operation.count);
  std::vector<Range> owned;
  for (int m = 0; m < machines_.count(); ++m) {
    const std::int64_t line = kLine / size_of(operation.dtype);
    const Range part = part_of(mine.count, machines_.count(), m, line);
    owned.push_back({mine.begin + part.begin, part.count});
  }
  exchange_plain(operation, {static_cast<std::byte*>(call.output), std::move(owned), true, true});
  gather_stripes(operation, operation.count, call.output);
}

// Blocks go by machines inside; where ranks of several machines alternate, they have to be moved.
const std::byte* Hosts::in_machine_order(const void* blocks, std::int64_t bytes,
                                         bool from_rank_order, std::byte* to) const {
  const auto* from = static_cast<const std::byte*>(blocks);
  std::int64_t place = 0;
  for (const auto& machine : machines_.ranks) {
    for (const int rank : machine) {
      const std::int64_t by_rank = rank * bytes, by_machine = place++ * bytes;
      move(to + (from_rank_order ? by_machine : by_rank),
           from + (from_rank_order ? by_rank : by_machine), bytes);
    }
  }
  return to;
}

void Hosts::reduce_scatter(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count, element = size_of(operation.dtype);
  const auto* input = static_cast<const std::byte*>(call.input);
  if (!machines_.in_order()) {
    input = in_machine_order(input, block * element, true,
                             blocks_.bytes(machines_.world() * block * element));
  }
  std::byte* const sums = sums_.bytes(machines_.world() * block * element);
  std::vector<Range> owned;
  for (int m = 0; m < machines_.count(); ++m) {
    const std::int64_t begin = segment(m, block), count = machines_.size(m) * block;
    reduce_to_stripes(operation, count, input + begin * element, sums + begin * element);
    owned.push_back(stripe(operation, begin, count));
  }
  exchange_plain(operation, {sums, std::move(owned), true, false});
  std::byte* const here = sums + segment(machines_.here, block) * element;
  gather_stripes(operation, machines_.size(machines_.here) * block, here);
  move(call.output, here + comm_.rank() * block * element, block * element);
}

void Hosts::all_gather(const Operation& operation, const Call& call) {
  const std::int64_t block = operation.count, element = size_of(operation.dtype);
  const bool in_order = machines_.in_order();
  std::byte* const all = in_order ? static_cast<std::byte*>(call.output)
                                  : blocks_.bytes(machines_.world() * block * element);
  std::byte* const here = all + segment(machines_.here, block) * element;
  if (comm_.size() == 1) {
    move(here, call.input, block * element);
  } else {
    comm_.begin_phase(operation, call.input, here);
    pycomm::all_gather(comm_);
  }
  std::vector<Range> owned;
  for (int m = 0; m < machines_.count(); ++m) {
    owned.push_back(stripe(operation, segment(m, block), machines_.size(m) * block));
  }
  exchange_plain(operation, {all, std::move(owned), false, true});
  for (int m = 0; m < machines_.count(); ++m) {
    if (m == machines_.here) continue;
    gather_stripes(operation, machines_.size(m) * block, all + segment(m, block) * element);
  }
  if (!in_order) {
    in_machine_order(all, block * element, false, static_cast<std::byte*>(call.output));
  }
}

void Hosts::broadcast(const Operation& operation, const Call& call) {
  std::vector<Range> owned(static_cast<std::size_t>(machines_.count()));
  bool from_here = false;
  for (int m = 0; m < machines_.count(); ++m) {
    for (int i = 0; i < machines_.size(m); ++i) {
      if (machines_.rank(m, i) != operation.root) continue;
      owned[static_cast<std::size_t>(m)] = stripe(operation, 0, operation.count);
      if (m != machines_.here) continue;
      from_here = true;
      Operation inside = operation;
      inside.root = i;
      comm_.begin_phase(inside, call.input, call.output);
      if (comm_.size() > 1) pycomm::broadcast(comm_);
    }
  }
  exchange_plain(operation, {static_cast<std::byte*>(call.output), std::move(owned), false, true});
  if (!from_here) gather_stripes(operation, operation.count, call.output);
}

void Hosts::barrier(const Operation& operation) {
  if (carries()) link_->meet();
  comm_.begin_phase(operation, nullptr, nullptr);
  comm_.announce();
}

bool Hosts::compressed(const Operation& operation, const Call& call) {
  keep_before(call);
  if (!machines_.single()) return compressed_sum(operation, call);
  const float largest = bit_cast<float>(largest_finite(operation.dtype));
  return exchange_coded(operation, call, largest, false).overflow != 0;
}

// The machine's ranks act as one.
bool Hosts::compressed_sum(const Operation& operation, const Call& call) {
  const Cycles cycles{machines_.count() * turn_of(operation.codec), machines_.stripes()};
  const Carried carried = carry(operation, call, cycles);
  const float ranks_per_machine =
      static_cast<float>(machines_.world()) / static_cast<float>(machines_.count());
  const float largest = bit_cast<float>(largest_finite(operation.dtype)) *
                        (operation.op == ReduceOp::avg ? ranks_per_machine : 1.0f);
  Outlook outlook = exchange_coded(carried.operation, carried.call, largest, true);
  outlook = unpack(operation, call, carried, cycles, outlook);
  if ((outlook.overflow & kUntouched) == 0 && outlook.unused == 0) {
    keep(operation, cycles, carried.call.feedback.residual, call.feedback.residual);
    keep(operation, cycles, carried.call.feedback.velocity, call.feedback.velocity);
  }
  return outlook.overflow != 0;
}

// What has been found before anything is sent: `together`, by all ranks of this machine.
Outlook Hosts::agree(Outlook mine, bool together) {
  if (!together) return mine;
  comm_.begin_phase(comm_.called(), nullptr, nullptr, mine);
  comm_.announce();
  return comm_.outlook();
}

Outlook Hosts::exchange_coded(const Operation& operation, const Call& call, float largest_result,
                              bool together) {
  if (!carries()) {
    agree(kIndifferent, together);
    return kIndifferent;
  }
  const std::uint32_t limit = safe_magnitude(operation, machines_.count(), largest_result);
  const auto finish = [&](auto& coded, auto&& part) {
    exchange(*link_, part);
    const bool untouched = coded.outlook().overflow != 0;
    return Outlook{untouched           ? kUntouched
                   : coded.nonfinite() ? kNonfinite
                                       : std::uint16_t{0},
                   coded.outlook().unused};
  };
  if (operation.codec.kind == CodecKind::topk) {
    TopkComm<Link> coded(*link_, topk_, operation, call, limit);
    link_->begin_tensor(operation, call.input, call.output, agree(coded.outlook(), together));
    coded.announce();
    return finish(coded, ListsPart(*link_, coded));
  }
  const Outlook outlook = agree(outlook_of(operation, call, limit), together);
  link_->begin_tensor(operation, call.input, call.output, outlook);
  CodedComm<Link> coded(*link_, operation, call.feedback, BlocksPart::staging(operation.codec));
  coded.announce();
  return finish(coded, BlocksPart(*link_, coded, operation, incoming_));
}

const float* Hosts::widened(const Operation& operation, const void* input) {
  if (operation.dtype == DType::f32) return static_cast<const float*>(input);
  float* const wide = wide_.floats(operation.count);
  Codec codec;
  codec.kind = CodecKind::cast;
  codec.values = operation.dtype;
  const Encoded narrow{static_cast<std::byte*>(const_cast<void*>(input)), nullptr};
  codec_loops(DType::f32, codec).decode(narrow, wide, operation.count, kSmallestBlock);
  return wide;
}

// The sum over the machine's ranks of what is in this rank's stripe, without gaps.
float* Hosts::fold(const Operation& operation, const Cycles& cycles, const float* mine,
                   Scratch& to) {
  if (mine == nullptr) return nullptr;
  float* const sums = to.floats(operation.count);
  Operation sum = phase(operation, operation.count);
  sum.dtype = DType::f32;
  sum.op = ReduceOp::sum;
  if (comm_.size() == 1) {
    move(sums, mine, operation.count * size_of(DType::f32));
    return sums;
  }
  comm_.begin_phase(sum, mine, sums);
  const CyclicStripes<Comm> stripes{comm_, cycles, first_element(operation), true};
  PYCOMM_CHECK(
      stripes.piece() * cycles.stripes <= comm_.slot_count(),
      "staging_bytes is too small to compress in " + std::to_string(cycles.stripes) + " stripes");
  pycomm::reduce_scatter(comm_, stripes);
  return sums;
}

Hosts::Carried Hosts::carry(const Operation& operation, const Call& call, const Cycles& cycles) {
  Carried carried{operation, call};
  float* const sums = fold(operation, cycles, widened(operation, call.input), gradient_);
  carried.call.input = carried.call.output = sums;
  Feedback& feedback = carried.call.feedback;
  feedback.residual = fold(operation, cycles, call.feedback.residual, residual_);
  feedback.velocity = fold(operation, cycles, call.feedback.velocity, velocity_);
  if (!carries()) return carried;
  const std::int64_t first = first_element(operation), n = operation.count;
  const std::int64_t begin = cycles.before(first, comm_.rank());
  const std::int64_t count = cycles.before(first + n, comm_.rank()) - begin;
  Operation& inner = carried.operation;
  inner.dtype = DType::f32;
  inner.count = count;
  inner.offset = static_cast<std::uint32_t>(begin / kSmallestBlock);
  if (n > 0) inner.codec.k = ceil_div(operation.codec.k * count, n);
  return carried;
}

// Puts the stripe's result where it belongs, for all ranks of the machine.
Outlook Hosts::unpack(const Operation& operation, const Call& call, const Carried& carried,
                      const Cycles& cycles, Outlook outlook) {
  if (carries()) {
    const auto* sums = static_cast<const float*>(carried.call.input);
    const Feedback& feedback = carried.call.feedback;
    const float divisor =
        operation.op == ReduceOp::avg ? static_cast<float>(machines_.world()) : 1.0f;
    const float factor = divisor * scaling_of(call.feedback).inverse;
    bool nonfinite = false;
    each_run(operation, cycles, comm_.rank(), [&](const Run& run) {
      const bool own = feedback.residual != nullptr && run.owner == machines_.here;
      nonfinite |=
          narrow(operation.dtype, sums + run.packed,
                 static_cast<std::byte*>(call.output) + run.begin * size_of(operation.dtype),
                 run.count, own ? feedback.residual + run.packed : nullptr, factor);
    });
    if (nonfinite && outlook.overflow == 0) outlook.overflow = kNonfinite;
  }
  if (comm_.size() == 1) return outlook;
  comm_.begin_phase(phase(operation, operation.count), call.output, call.output, outlook);
  pycomm::all_gather(comm_, CyclicStripes<Comm>{comm_, cycles, first_element(operation), false});
  return comm_.outlook();
}

// This rank has what it carries, and nothing of the other stripes.
void Hosts::keep(const Operation& operation, const Cycles& cycles, const float* carried,
                 float* state) {
  if (state == nullptr) return;
  std::fill_n(state, operation.count, 0.0f);
  if (!carries()) return;
  each_run(operation, cycles, comm_.rank(), [&](const Run& run) {
    move(state + run.begin, carried + run.packed, run.count * size_of(DType::f32));
  });
}

}  // namespace pycomm::cpu

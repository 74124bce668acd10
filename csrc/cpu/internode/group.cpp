#include "cpu/internode/group.h"

#include "core/algorithms/run.h"
#include "core/codecs/cast.h"
#include "cpu/loops.h"

namespace pycomm::cpu {
namespace {

void move(void* to, const void* from, std::int64_t bytes) {
  if (to == from || bytes == 0) return;
  copy({static_cast<std::byte*>(to), false}, static_cast<const std::byte*>(from), bytes);
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
  comm_.leave_peers_heaps();  // the exchange between machines may take long
}

void Hosts::gather_stripes(const Operation& operation, std::int64_t count, void* data) {
  if (comm_.size() == 1) return;
  comm_.begin_phase(phase(operation, count), data, data);
  pycomm::all_gather(comm_, EvenStripes<Comm>{comm_, machines_.stripes()});
}

void Hosts::exchange_plain(const Operation& operation, PlainPart::Work work) {
  if (!carries()) return;
  link_->meet();
  PlainPart part(*link_, operation, std::move(work), scratch_.incoming);
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
                             scratch_.blocks.bytes(machines_.world() * block * element));
  }
  std::byte* const sums = scratch_.sums.bytes(machines_.world() * block * element);
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
                                  : scratch_.blocks.bytes(machines_.world() * block * element);
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

void Hosts::trim() {
  topk_.trim(comm_.sequence());
  pool_memory_ = {};
  scratch_ = {};
  if (carries()) link_->trim();
}

void Hosts::barrier(const Operation& operation) {
  if (carries()) link_->meet();
  comm_.begin_phase(operation, nullptr, nullptr);
  comm_.announce();
}

bool Hosts::compressed(const Operation& operation, const Call& call) {
  if (!machines_.single()) return compressed_sum(operation, call);
  const float largest = bit_cast<float>(largest_finite(operation.dtype));
  return exchange_coded(operation, call, largest, nullptr).overflow != 0;
}

bool Hosts::compressed_sum(const Operation& operation, const Call& call) {
  Pool pool(comm_, machines_, pool_memory_, operation, call);
  pool.collect_first();
  const float ranks_per_machine =
      static_cast<float>(machines_.world()) / static_cast<float>(machines_.count());
  const float largest = bit_cast<float>(largest_finite(operation.dtype)) *
                        (operation.op == ReduceOp::avg ? ranks_per_machine : 1.0f);
  const Outlook outlook = exchange_coded(pool.carried(), pool.call(), largest, &pool);
  if ((outlook.overflow & kUntouched) == 0 && outlook.unused == 0) pool.keep();
  return outlook.overflow != 0;
}

// What has been found before anything is sent: of a pool, by all ranks of this machine.
Outlook Hosts::agree(Outlook mine, const Pool* pool) {
  if (pool == nullptr) return mine;
  comm_.begin_phase(comm_.called(), nullptr, nullptr, mine);
  comm_.announce();
  return comm_.outlook();
}

// Between machines; of a pool, also from its ranks and to them.
template <class Coded, class Part>
Outlook Hosts::exchange_parts(const Coded& coded, Part part, Pool* pool) {
  const auto finding = [&coded] {
    const bool untouched = coded.outlook().overflow != 0;
    const std::uint16_t nonfinite = coded.nonfinite() ? kNonfinite : std::uint16_t{0};
    return Outlook{untouched ? kUntouched : nonfinite, coded.outlook().unused};
  };
  if (pool == nullptr) {
    exchange(*link_, part);
    return finding();
  }
  Pooled pooled(*pool, part, finding);
  exchange(*link_, pooled);
  return pooled.outlook();
}

// `pool`: where the tensor is one, or null.
Outlook Hosts::exchange_coded(const Operation& operation, const Call& call, float largest_result,
                              Pool* pool) {
  if (!carries()) {
    agree(kIndifferent, pool);
    NoPart nothing;
    NoLink nowhere;
    Pooled pooled(*pool, nothing, [] { return kIndifferent; });
    exchange(nowhere, pooled);
    return pooled.outlook();
  }
  const float limit = largest_safe(operation, machines_.count(), largest_result);
  if (operation.codec.kind == CodecKind::topk) {
    TopkComm<Link> coded(*link_, topk_, operation, call, limit);
    link_->begin_tensor(operation, call.input, call.output, agree(coded.outlook(), pool));
    coded.announce();
    return exchange_parts(coded, ListsPart(*link_, coded, list_lengths_), pool);
  }
  const Outlook outlook = agree(outlook_of(operation, call, limit), pool);
  link_->begin_tensor(operation, call.input, call.output, outlook);
  const Stretches stretches =
      pool != nullptr
          ? pool->stretches()
          : stretches_of(operation, {machines_.count() * kOwnedElements, 1}, machines_.count());
  CodedComm<Link> coded(*link_, operation, call.feedback, limit,
                        BlocksPart::staging(operation.codec, stretches));
  coded.announce();
  return exchange_parts(coded, BlocksPart(*link_, coded, operation, stretches, scratch_.incoming),
                        pool);
}

}  // namespace pycomm::cpu

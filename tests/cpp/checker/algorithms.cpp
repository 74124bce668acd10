#include "checker/algorithms.h"

#include "checker/coded_comm.h"
#include "checker/exchange_part.h"
#include "checker/topk_comm.h"
#include "core/run.h"
#include "core/stripes.h"

namespace pycomm::checker {
namespace {

void run_blocks(Comm& comm, const Operation& operation) {
  CodedComm coded(comm, operation);
  if (operation.algorithm == Algorithm::ring) {
    ring(coded);
  } else if (operation.algorithm == Algorithm::tree) {
    tree(coded);
  } else {
    two_shot(coded, coded.chunks());
  }
}

Operation phase_of(const Operation& operation) {
  Operation phase = operation;
  phase.algorithm = Algorithm::two_shot;
  return phase;
}

}  // namespace

std::int64_t list_area_bytes(const Operation& operation, int ranks, int rank) {
  return TopkArea(operation, ranks).bytes(rank);
}

std::int64_t parcel_buffer_bytes(const Operation& operation, int nodes) {
  return ExchangePart::buffer_elements(nodes) * size_of(operation.dtype);
}

void run_on_node(Comm& comm, const Operation& operation, const Buffers& buffers, int fail_at) {
  if (operation.codec.kind == CodecKind::topk) {
    std::byte* const area = buffers.areas[comm.next_parity()];
    comm.begin(operation, area, area, fail_at);
    TopkComm coded(comm, operation, buffers.input, buffers.output);
    topk_exchange(coded);
  } else {
    comm.begin(operation, buffers.input, buffers.output, fail_at);
    if (operation.codec.kind == CodecKind::none) {
      run(comm, operation);
    } else {
      run_blocks(comm, operation);
    }
  }
  comm.finish();
}

void run_stripes(Comm& comm, const Operation& operation, const Buffers& buffers) {
  const Cycles cycles{2 * kOwnedElements, comm.size()};
  const std::int64_t first = first_element(operation);
  const CyclicStripes<Comm> packed{comm, cycles, first, true}, spread{comm, cycles, first, false};
  comm.begin(phase_of(operation), buffers.input, buffers.scratch);
  reduce_scatter(comm, packed);
  comm.begin_phase(phase_of(operation), buffers.output, buffers.output);
  for (std::int64_t t = 0; t < packed.tiles().count(); ++t) {
    const Chunk mine = packed(t, comm.rank());
    comm.copy(comm.at(comm.output(), mine.input),
              comm.at({buffers.scratch, comm.rank()}, mine.output), mine.count);
  }
  all_gather(comm, spread);
  comm.finish();
}

void run_between_nodes(Comm& comm, Link* link, int stripes, const Operation& operation,
                       const Buffers& buffers) {
  comm.begin(operation, nullptr, nullptr);
  comm.announce();
  comm.begin_phase(phase_of(operation), buffers.input, buffers.output);
  if (comm.size() > 1) {
    reduce_scatter(comm, EvenStripes<Comm>{comm, stripes}, false);
    comm.leave_peers_heaps();
  } else {
    comm.copy(comm.output(), comm.input(), comm.count());
  }
  if (link != nullptr) {
    const Range mine = part_of(operation.count, stripes, comm.rank(), comm.line());
    std::vector<Range> owned;
    for (int m = 0; m < link->size(); ++m) {
      const Range part = part_of(mine.count, link->size(), m, comm.line());
      owned.push_back({mine.begin + part.begin, part.count});
    }
    ExchangePart part(comm, *link, buffers.scratch, std::move(owned));
    exchange(*link, part);
  }
  if (comm.size() > 1) {
    comm.begin_phase(phase_of(operation), buffers.output, buffers.output);
    all_gather(comm, EvenStripes<Comm>{comm, stripes});
  }
  comm.finish();
}

}  // namespace pycomm::checker

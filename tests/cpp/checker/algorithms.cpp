#include "checker/algorithms.h"

#include "checker/sharded_step.h"
#include "core/algorithms/run.h"
#include "core/algorithms/stripes.h"
#include "cpu/codecs/coded_comm.h"
#include "cpu/codecs/topk_comm.h"

namespace pycomm::checker {
namespace {

void run_blocks(Comm& comm, const Call& call) {
  const Operation& operation = call.operation;
  cpu::CodedComm<Comm> coded(comm, operation, call.feedback, kInfinity,
                             CodedStaging::in(comm.slot_bytes() * kStagingSlots, operation.codec),
                             cpu::codec_loops(operation.dtype, operation.codec));
  run_coded(coded, operation);
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

void run_on_node(Comm& comm, const Buffers& buffers) {
  const Call& call = buffers.call;
  const Operation& operation = call.operation;
  if (operation.codec.kind == CodecKind::topk) {
    cpu::TopkWorkspace workspace(nullptr);
    cpu::TopkComm<Comm> coded(comm, workspace, operation, call, kInfinity);
    std::byte* const area = buffers.areas[comm.next_parity()];
    comm.begin(operation, area, area);
    topk_exchange(coded);
  } else {
    comm.begin(operation, call.input, call.output);
    if (operation.collective == Collective::sharded_step) {
      ShardedStepComm sharded(comm, buffers);
      sharded_step(sharded);
    } else if (operation.codec.kind == CodecKind::none) {
      run(comm, operation);
    } else {
      run_blocks(comm, call);
    }
  }
  comm.finish();
}

void run_stripes(Comm& comm, const Buffers& buffers) {
  const Call& call = buffers.call;
  const Operation& operation = call.operation;
  const StripeInterleave interleave{2 * kOwnedElements, comm.size()};
  const std::int64_t first = first_element(operation);
  const CyclicStripes<Comm> packed{comm, interleave, first, true},
      spread{comm, interleave, first, false};
  comm.begin(phase_of(operation), call.input, buffers.scratch);
  reduce_scatter(comm, packed);
  comm.begin_phase(phase_of(operation), call.output, call.output);
  for (std::int64_t t = 0; t < packed.tiles().count(); ++t) {
    const Chunk mine = packed(t, comm.rank());
    comm.copy(comm.at(comm.output(), mine.input),
              comm.at({buffers.scratch, comm.rank()}, mine.output), mine.count);
  }
  all_gather(comm, spread);
  comm.finish();
}

}  // namespace pycomm::checker

#include "cpu/executor/blocks.h"

#include <algorithm>
#include <optional>

#include "core/algorithms/run.h"
#include "core/errors.h"
#include "cpu/executor/comm.h"

namespace pycomm::cpu {
namespace {

bool takes_inputs(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::scatter ||
         collective == Collective::all_to_all;
}
bool takes_outputs(Collective collective) {
  return collective == Collective::all_gather || collective == Collective::gather ||
         collective == Collective::all_to_all;
}

bool each_its_own(const Call& call) {
  return call.operation.collective == Collective::all_to_all && call.inputs.counts != nullptr;
}

}  // namespace

std::int64_t BlockCounts::largest() const { return *std::max_element(all_.begin(), all_.end()); }

std::optional<CollectiveError> BlockCounts::disagreement(const Comm& comm,
                                                         const Operation& operation) const {
  const std::int64_t units = units_of(operation);
  for (int from = 0; from < ranks_; ++from) {
    for (int to = 0; to < ranks_; ++to) {
      const std::int64_t sent = at(from, to), expected = at(to, ranks_ + from);
      if (sent == expected) continue;
      return uneven(from, sent / units, to, expected / units, comm.pid_of(from), comm.called(),
                    comm.ordinal());
    }
  }
  return {};
}

void fail_together(Comm& comm, const Operation& operation, const CollectiveError& error) {
  try {
    comm.begin_phase(operation, nullptr, nullptr);
    comm.announce();
  } catch (const CollectiveError& other) {
    if (other.reason != error.reason) throw;
  }
  throw error;
}

BlockTable::BlockTable(const Blocks& blocks, const void* begin, const Operation& operation,
                       int ranks) {
  auto* next = static_cast<std::byte*>(const_cast<void*>(begin));
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t count =
        blocks.counts != nullptr ? blocks.counts[r] * units_of(operation) : operation.count;
    counts.push_back(count);
    addresses.push_back(blocks.addresses != nullptr
                            ? static_cast<std::byte*>(const_cast<void*>(blocks.addresses[r]))
                            : next);
    if (next != nullptr) next += count * size_of(operation.dtype);
  }
}

void set_count(Operation& operation, const Call& call, int ranks) {
  const bool sends = call.inputs.counts != nullptr;
  if (!sends && call.outputs.counts == nullptr) return;
  const BlockTable sized(sends ? call.inputs : call.outputs, nullptr, operation, ranks);
  operation.count = each_its_own(call) ? 0 : sized.largest();
}

std::int64_t BlockTable::largest() const { return *std::max_element(counts.begin(), counts.end()); }

std::string refusal_of_blocks(const Call& call, int ranks) {
  const Collective collective = call.operation.collective;
  if ((call.inputs && !takes_inputs(collective)) || (call.outputs && !takes_outputs(collective))) {
    return std::string(name_of(collective)) + " takes no list of blocks as its " +
           (call.inputs && !takes_inputs(collective) ? "input" : "output");
  }
  const std::int64_t *in = call.inputs.counts, *out = call.outputs.counts;
  if (in == nullptr && out == nullptr) return {};
  if (collective == Collective::gather || collective == Collective::scatter) {
    return std::string(name_of(collective)) + " needs blocks of equal size";
  }
  if (collective == Collective::all_to_all && (in == nullptr || out == nullptr)) {
    return "all_to_all needs the counts of both its input and its output, or of neither";
  }
  const auto negative = [&](const std::int64_t* counts) {
    return counts != nullptr && std::any_of(counts, counts + ranks, [](auto n) { return n < 0; });
  };
  return negative(in) || negative(out) ? "counts of blocks must not be negative" : "";
}

void run_in_blocks(Comm& comm, Operation operation, const Call& call, void (*interrupt)()) {
  set_count(operation, call, comm.size());
  const CallBlocks blocks(call, operation, comm.size());
  const BlockTable* const inputs = call.inputs ? &blocks.inputs : nullptr;
  const BlockTable* const outputs = call.outputs ? &blocks.outputs : nullptr;
  comm.begin(operation, call.input, call.output, interrupt);
  if (each_its_own(call)) {
    comm.announce();
    const BlockCounts counts(comm.size(), blocks, [&](const Operation& gather, const Call& all) {
      comm.begin_phase(gather, all.input, all.output);
      all_gather(comm);
    });
    if (const auto error = counts.disagreement(comm, operation)) {
      fail_together(comm, operation, *error);
    }
    operation.count = counts.largest();
    comm.begin_phase(operation, call.input, call.output);
  }
  comm.use_blocks(inputs, outputs);
  if (comm.size() > 1) return pycomm::run(comm, operation);
  const std::int64_t count = inputs != nullptr ? inputs->counts[0] : outputs->counts[0];
  if (count > 0) comm.copy(comm.output_at(0), comm.input_at(0), count);
}

}  // namespace pycomm::cpu

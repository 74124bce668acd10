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

// All ranks' counts, a row per rank: what it sends to each rank, then what it expects from each.
class Counts {
 public:
  Counts(Comm& comm, const CallBlocks& blocks)
      : ranks_(comm.size()), all_(static_cast<std::size_t>(2 * ranks_ * ranks_)) {
    std::vector<std::int64_t> mine = blocks.inputs.counts;
    mine.insert(mine.end(), blocks.outputs.counts.begin(), blocks.outputs.counts.end());
    comm.begin_phase(
        {Collective::all_gather, Algorithm::two_shot, DType::i64, ReduceOp::sum, 0, 2 * ranks_},
        mine.data(), all_.data());
    all_gather(comm);
  }

  std::int64_t sent(int from, int to) const { return at(from, to); }
  std::int64_t expected(int from, int to) const { return at(to, ranks_ + from); }
  std::int64_t largest() const { return *std::max_element(all_.begin(), all_.end()); }

 private:
  std::int64_t at(int row, int column) const {
    return all_[static_cast<std::size_t>(row * 2 * ranks_ + column)];
  }

  const int ranks_;
  std::vector<std::int64_t> all_;
};

// All ranks find the same pair.
std::optional<CollectiveError> disagreement(const Comm& comm, const Counts& counts,
                                            std::int64_t units) {
  for (int from = 0; from < comm.size(); ++from) {
    for (int to = 0; to < comm.size(); ++to) {
      const std::int64_t sent = counts.sent(from, to), expected = counts.expected(from, to);
      if (sent == expected) continue;
      return uneven(from, sent / units, to, expected / units, comm.pid(from), comm.called(),
                    comm.ordinal());
    }
  }
  return {};
}

// Throws an error that all ranks have found, once they all have: a rank that still waited for their
// counts would only learn that the group has been aborted.
[[noreturn]] void fail_together(Comm& comm, const Operation& operation,
                                const CollectiveError& error) {
  try {
    comm.begin_phase(operation, nullptr, nullptr);
    comm.announce();
  } catch (const CollectiveError& other) {
    if (other.reason != error.reason) throw;
  }
  throw error;
}

}  // namespace

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

std::int64_t BlockTable::largest() const { return *std::max_element(counts.begin(), counts.end()); }

std::string refusal_of_blocks(const Call& call, int ranks) {
  const Collective collective = call.operation.collective;
  if ((call.inputs && !takes_inputs(collective)) || (call.outputs && !takes_outputs(collective))) {
    return std::string(name_of(collective)) + " has no block per rank there";
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
  const CallBlocks blocks(call, operation, comm.size());
  const BlockTable* const inputs = call.inputs ? &blocks.inputs : nullptr;
  const BlockTable* const outputs = call.outputs ? &blocks.outputs : nullptr;
  const bool each_its_own =
      operation.collective == Collective::all_to_all && call.inputs.counts != nullptr;
  const BlockTable* const sized = call.inputs.counts != nullptr    ? inputs
                                  : call.outputs.counts != nullptr ? outputs
                                                                   : nullptr;
  // In an all-to-all, the ranks do not know the largest block yet.
  if (sized != nullptr) operation.count = each_its_own ? 0 : sized->largest();
  comm.begin(operation, call.input, call.output, interrupt);
  if (each_its_own) {
    comm.announce();
    const Counts counts(comm, blocks);
    if (const auto error = disagreement(comm, counts, units_of(operation))) {
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

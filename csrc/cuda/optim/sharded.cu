// The host's side of sharded steps: their tables and calls.
#include "cuda/optim/sharded.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/optim/table.h"
#include "cuda/optim/shard_table.h"

namespace pycomm::cuda {
namespace {

template <class Row>
void put(std::vector<std::uint64_t>& words, const Row& row) {
  static_assert(sizeof(Row) % 8 == 0);
  const std::size_t at = words.size();
  words.resize(at + sizeof(Row) / 8);
  std::memcpy(words.data() + at, &row, sizeof(Row));
}

// Unlike on the CPU, the numbers of steps are left out, because they lie on the device.
std::uint64_t hash_of(const ShardedStep& step) {
  std::uint64_t hash = kHashOfNothing;
  for (const ShardGroup& group : step.groups) {
    hash = add_to_hash(add_to_hash(hash, group.settings), std::uint64_t(group.end));
  }
  for (const Shard& shard : step.shards) hash = add_to_hash(hash, shard);
  return add_to_hash(hash, bit_cast<std::uint64_t>(step.max_norm));
}

}  // namespace

std::int64_t ShardTable::set(const ShardedStep& step) {
  rule_ = step.groups.empty() ? Rule{} : step.groups[0].settings.rule;
  StepHeader header{};
  header.control = step.control;
  header.norm = step.norm;
  header.max_norm = step.max_norm;
  header.sums = step.sums;
  header.groups = static_cast<std::int64_t>(step.groups.size());
  header.shards = static_cast<std::int64_t>(step.shards.size());
  header.measures = step.measures ? 1 : 0;
  std::vector<ShardRow> rows;
  std::int64_t g = 0;
  for (const Shard& shard : step.shards) {
    while (rows.size() >= step.groups[static_cast<std::size_t>(g)].end) ++g;
    rows.push_back({shard, g, header.chunks, header.leaves, header.nodes});
    header.chunks += sum_blocks(shard.part.count);
    header.leaves += sum_blocks(shard.whole);
    header.nodes += nodes_of(sum_blocks(shard.whole));
  }
  rows.push_back({{}, g, header.chunks, header.leaves, header.nodes});
  std::vector<GroupRow> groups;
  for (const ShardGroup& group : step.groups) {
    const Settings& settings = group.settings;
    PYCOMM_CHECK(settings.rule == rule_, "all groups of a sharded step must have one rule");
    if (rule_ == Rule::lamb && settings.adapt) header.adapts = 1;
    groups.push_back(
        {settings, group.lr, group.lr_is_double ? 1 : 0, std::int64_t{Rules::choice(settings)}});
  }
  std::vector<std::uint64_t> words;
  put(words, header);
  for (const GroupRow& group : groups) put(words, group);
  for (const ShardRow& row : rows) put(words, row);
  const StepTable table{words.data()};
  const std::int64_t bytes = round_up(table.size() * 8, 16);
  words.resize(static_cast<std::size_t>(table.written()));  // with tickets
  words_.set(std::move(words));
  return bytes;
}

Call step_call(const ShardedStep& step, const std::string& label) {
  char hash[17];
  std::snprintf(hash, sizeof(hash), "%016llx", static_cast<unsigned long long>(hash_of(step)));
  Call call;
  call.operation.collective = Collective::sharded_step;
  call.operation.dtype = DType::u8;
  call.operation.count = step.arena_bytes;
  call.input = call.output = step.arena;
  call.details.set_label(label + ", options " + hash);
  return call;
}

}  // namespace pycomm::cuda

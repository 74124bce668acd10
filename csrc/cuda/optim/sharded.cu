// The host's side of sharded steps and averages: their tables and calls.
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

// Unlike on the CPU without the numbers of steps, which lie on the device.
std::uint64_t hash_of(const ShardedStep& step) {
  std::uint64_t hash = kHashOfNothing;
  for (const ShardGroup& group : step.groups) {
    hash = add_to_hash(add_to_hash(hash, group.settings), std::uint64_t(group.end));
  }
  for (const Shard& shard : step.shards) hash = add_to_hash(hash, shard);
  return add_to_hash(hash, bit_cast<std::uint64_t>(step.max_norm));
}

Call make_call(Collective collective, std::byte* arena, std::int64_t bytes,
               const std::string& label) {
  Call call;
  call.operation.collective = collective;
  call.operation.dtype = DType::u8;
  call.operation.count = bytes;
  call.input = call.output = arena;
  call.details.set_label(label);
  return call;
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

std::int64_t ShardTable::set(const ShardedAverage& average) {
  std::vector<std::uint64_t> words;
  AverageHeader header{static_cast<std::int64_t>(average.gradients.size()), 0};
  put(words, header);
  for (const OwnGradient& gradient : average.gradients) {
    put(words, AverageRow{gradient, header.chunks});
    header.chunks += sum_blocks(gradient.count);
  }
  put(words, AverageRow{{}, header.chunks});
  std::memcpy(words.data(), &header, sizeof(header));
  const auto bytes = static_cast<std::int64_t>(words.size()) * 8;
  words_.set(std::move(words));
  return round_up(bytes, 16);
}

Call step_call(const ShardedStep& step, const std::string& label) {
  char hash[17];
  std::snprintf(hash, sizeof(hash), "%016llx", static_cast<unsigned long long>(hash_of(step)));
  return make_call(Collective::sharded_step, step.arena, step.arena_bytes,
                   label + ", options " + hash);
}

Call average_call(const ShardedAverage& average, const std::string& label) {
  return make_call(Collective::sharded_average, average.arena, average.arena_bytes, label);
}

}  // namespace pycomm::cuda

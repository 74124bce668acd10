// The table that a sharded step reads in device memory. Host and device.
//
//   | header | groups | shards, and the end | tickets | terms of sums | ratios |
//    <--------------- written by the host ----------->
//
// A chunk is 1,024 elements of this rank's part of a parameter, a leaf is the sum of a chunk of any rank,
// and a node is the sum of 1,024 leaves of a parameter. Tickets are zero between launches.
#pragma once

#include "core/optim/shard.h"
#include "core/optim/square_sum.h"
#include "cuda/layout.h"
#include "cuda/optim/table.h"

namespace pycomm::cuda {

struct StepHeader {
  StepControl control;
  double* norm;
  double max_norm;
  double* sums;
  std::int64_t groups, shards;
  std::int64_t chunks, leaves, nodes;
  std::int64_t measures, adapts;  // not 0: true
};

struct GroupRow {
  Settings settings;
  const void* lr;
  std::int64_t lr_is_double;
  std::int64_t choice;  // of the rule's element updates
};

// The last row is the end: its shard is empty.
struct ShardRow {
  Shard shard;
  std::int64_t group;
  std::int64_t first_chunk, first_leaf, first_node;
};

// A parameter without elements has a node, too, so that it takes part in sums.
PYCOMM_HD constexpr std::int64_t nodes_of(std::int64_t leaves) {
  return leaves == 0 ? 1 : sum_blocks(leaves);
}

// The row in [0, rows) that a chunk or node belongs to.
PYCOMM_HD std::int64_t row_at(const ShardRow* rows, std::int64_t count,
                              std::int64_t ShardRow::* first, std::int64_t place) {
  std::int64_t low = 0;
  for (std::int64_t high = count; high - low > 1;) {
    const std::int64_t middle = (low + high) / 2;
    (rows[middle].*first <= place ? low : high) = middle;
  }
  return low;
}

template <class T>
inline constexpr std::int64_t kWordsOf = sizeof(T) / 8;

struct StepTable {
  std::uint64_t* words;

  // The tickets of lanes: how many have come to the meetings of this launch, whether one of them has
  // failed, and how many have left.
  enum LaneTicket : int { kCame, kFailed, kLeft, kLaneTickets };

  PYCOMM_HD const StepHeader& header() const { return *reinterpret_cast<StepHeader*>(words); }
  PYCOMM_HD Forest within() const { return {header().nodes, header().shards}; }
  PYCOMM_HD Forest over() const { return {header().shards, 1}; }
  PYCOMM_HD std::int64_t shards_at() const {
    return kWordsOf<StepHeader> + header().groups * kWordsOf<GroupRow>;
  }
  PYCOMM_HD std::int64_t tickets_at() const {
    return shards_at() + (header().shards + 1) * kWordsOf<ShardRow>;
  }
  PYCOMM_HD std::int64_t written() const {
    return tickets_at() + ceil_div(kLaneTickets + within().tickets() + over().tickets(), 2);
  }
  // LAMB needs two sums per term.
  PYCOMM_HD std::int64_t ratios_at() const {
    return written() + 2 * (within().terms() + over().terms());
  }
  PYCOMM_HD std::int64_t size() const { return ratios_at() + header().shards; }

  PYCOMM_HD const GroupRow& group(std::int64_t g) const {
    return reinterpret_cast<const GroupRow*>(words + kWordsOf<StepHeader>)[g];
  }
  PYCOMM_HD const ShardRow* shards() const {
    return reinterpret_cast<const ShardRow*>(words + shards_at());
  }
  PYCOMM_HD std::uint32_t* tickets() const {
    return reinterpret_cast<std::uint32_t*>(words + tickets_at());
  }
  PYCOMM_HD double* terms() const { return reinterpret_cast<double*>(words + written()); }
  PYCOMM_HD double* ratios() const { return reinterpret_cast<double*>(words + ratios_at()); }
};

}  // namespace pycomm::cuda

// The CPU executor of the sharded optimizer step (core/algorithms/sharded_step.h).
//
// Each rank has an arena in its heap, with the same layout on every rank: parameters, their gradients if
// they are still to be averaged, and room for all ranks' sums.
#pragma once

#include <vector>

#include "core/algorithms/sharded_step.h"
#include "core/optim/shard.h"
#include "cpu/executor/custom_operation.h"
#include "cpu/optim/step.h"
#include "cpu/optim/update.h"

namespace pycomm::cpu {

struct ShardGroup {
  Settings settings;
  std::size_t end;  // after the group's last shard
};

// What one rank passes to a sharded step, and what it gets back.
struct ShardedStep final : CustomOperation {
  Preflight preflight() const override;
  void run(Comm& comm) override;
  void note_failure(const Comm& comm) override { half_done = comm.anyone_signalled(kUpdating); }

  std::vector<ShardGroup> groups;
  std::vector<Shard> shards;
  std::byte* arena = nullptr;
  std::int64_t arena_bytes = 0;
  double* sums = nullptr;  // in the arena: kShardSums per 1,024 elements of all shards
  StepControl control = {};
  double max_norm = 0.0;
  bool measures = false;  // the norm is needed, or a search for infinities
  Parallel parallel;

  double norm = 0.0;
  bool half_done = false;  // after a failure: some parameters may have changed
};

// What must be the same on all ranks, as text: `label`, and a hash of the rest.
std::string compared(const ShardedStep& step, const std::string& label);

// The call that runs a step among the ranks of a node. All ranks must pass the same `label`.
Call sharded_call(ShardedStep& step, const std::string& label);

// The phases of a step that need no other rank's cooperation.
class ShardUpdate {
 public:
  explicit ShardUpdate(ShardedStep& step);

  // Sets the arenas of all ranks, which get sums and parameters; this rank's arena is number
  // `rank`.
  void use_arenas(std::vector<std::byte*> arenas, int rank);
  // Sets whether a rank has found an infinity before the step.
  void note_found(bool found);

  // The number of sums of each kind.
  std::int64_t sums() const { return wholes_.chunks(); }
  bool skips() const { return found_ || pycomm::skips(step_.control); }

  // The phases of core/algorithms/sharded_step.h. Phases that read gradients return the bytes that
  // they have read from other ranks.
  std::int64_t measure();
  void conclude_norm();
  bool adapts() const;
  std::int64_t measure_ratios();
  void conclude_ratios();
  std::int64_t update();

 private:
  // The average of a shard's gradients in one chunk after another.
  class Average;

  int size() const { return static_cast<int>(arenas_.size()); }
  // Calls visit(shard, first, last) for this rank's chunks, on any number of threads.
  template <class Visit>
  void for_chunks(const Visit& visit) const;
  const Settings& settings(std::size_t shard) const;
  float scale(std::size_t shard) const {
    return gradient_factor(settings(shard).maximize, step_.control);
  }
  // The address in rank r's arena that corresponds to one in this rank's.
  std::byte* there(int r, const void* here) const {
    return arenas_[static_cast<std::size_t>(r)] +
           (static_cast<const std::byte*>(here) - step_.arena);
  }
  std::int64_t gradient_bytes() const;
  // Writes a sum of this rank to all ranks.
  void put_sum(ShardSum kind, std::size_t shard, std::int64_t chunk, double sum) const;
  // Adds a parameter's sums of one kind.
  double total(ShardSum kind, std::size_t shard) const;

  ShardedStep& step_;
  Row parts_, wholes_;
  std::vector<std::byte*> arenas_;
  int rank_ = 0;
  std::vector<double> ratios_;
  bool found_ = false;
};

class ShardedStepComm {
 public:
  ShardedStepComm(Comm& comm, ShardedStep& step) : comm_(comm), step_(step), update_(step) {}

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  void announce();
  void signal(int channel) { comm_.signal(channel); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  bool measures() const { return step_.measures; }
  void measure() { comm_.count_in(update_.measure()); }
  void conclude_norm() { update_.conclude_norm(); }
  bool adapts() const { return update_.adapts(); }
  void measure_ratios() { comm_.count_in(update_.measure_ratios()); }
  void conclude_ratios() { update_.conclude_ratios(); }
  void update() { comm_.count_in(update_.update()); }

 private:
  Comm& comm_;
  ShardedStep& step_;
  ShardUpdate update_;
};

static_assert(ShardExecutor<ShardedStepComm>);

}  // namespace pycomm::cpu

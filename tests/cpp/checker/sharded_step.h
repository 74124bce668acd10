// The checker's executor of the sharded optimizer step, with a rank's input for its gradients and its
// output for its parameters.
#pragma once

#include "checker/algorithms.h"
#include "checker/fibers.h"
#include "core/algorithms/sharded_step.h"

namespace pycomm::checker {

class ShardedStepComm {
 public:
  ShardedStepComm(Comm& comm, const Buffers& buffers) : comm_(comm), buffers_(buffers) {}

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  void announce() { comm_.announce(); }
  void publish() { comm_.publish(); }  // for a mutant
  void signal(int channel) { comm_.signal(channel); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  bool measures() const { return buffers_.measures; }
  void measure() { put_sum(0); }
  void conclude_norm() { take_sums(0); }
  bool adapts() const { return buffers_.adapts; }
  void measure_ratios() { put_sum(1); }
  void conclude_ratios() { take_sums(1); }

  void update() {
    comm_.read(mine(buffers_.shared[rank()].output, rank()), count(), comm_.unit());
    const Pieces made = average();
    for (int r = 0; r < size(); ++r) {
      comm_.count_wait();  // a rank may fail in the middle of its update
      comm_.fibers().pause();
      comm_.write(mine(buffers_.shared[r].output, r), made, comm_.unit());
    }
  }

 private:
  static constexpr Unit kSum{8};

  // This rank's elements are [begin(), begin() + count()).
  std::int64_t begin() const { return comm_.count() * rank() / size(); }
  std::int64_t count() const { return comm_.count() * (rank() + 1) / size() - begin(); }
  // This rank's elements of a tensor of rank r.
  Location mine(std::byte* tensor, int r) const { return comm_.at({tensor, r}, begin()); }

  Pieces average() {
    comm_.fibers().pause();
    std::vector<Pieces> terms;
    for (int r = 0; r < size(); ++r) {
      terms.push_back(comm_.read(mine(buffers_.shared[r].input, r), count(), comm_.unit()));
    }
    return comm_.sum(terms, true);
  }

  void put_sum(int kind) {
    const Pieces all = average();
    const Symbol sum = all.empty() ? comm_.symbols().contribution(kZero) : all[0].symbol;
    for (int r = 0; r < size(); ++r) {
      comm_.fibers().pause();
      std::byte* const place = buffers_.shared[r].sums + (kind * size() + rank()) * kSum.bytes;
      comm_.write({place, r}, {{1, sum, rank()}}, kSum);
    }
  }
  void take_sums(int kind) {
    std::byte* const sums = buffers_.shared[rank()].sums + kind * size() * kSum.bytes;
    comm_.read({sums, rank()}, size(), kSum);
  }

  Comm& comm_;
  const Buffers& buffers_;
};

static_assert(ShardExecutor<ShardedStepComm>);

}  // namespace pycomm::checker

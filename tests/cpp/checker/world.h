// Ranks that run a sequence of operations on the checker's executor, and a check of the results:
// every rank holds every rank's contribution exactly once, added in the same order; the same holds
// for all residuals together.
#pragma once

#include "checker/algorithms.h"
#include "checker/fibers.h"
#include "cpu/internode/group.h"

namespace pycomm::checker {

enum class Where { window, own, mixed };  // mixed: only rank 0's are in its window

// An operation that all ranks call. The caller overwrites the tensors before it and reads the
// result after it, so it is a race if another rank still uses them.
struct Step {
  Operation operation;
  Where where = Where::own;
  bool in_place = true;
  bool stripes = false;   // run_stripes()
  bool feedback = false;  // with a residual
  bool measures = false;  // sharded step: exchanges sums for the norm
  bool adapts = false;    // sharded step: exchanges sums for LAMB's ratios
};

// A rank that throws or dies in a wait of an operation.
struct Fault {
  int rank = -1;
  std::size_t step = 0;
  int wait = Comm::kNeverFails;
  bool dies = false;
  bool retreats = true;  // false: all ranks break the contract and return at once
};

class World {
 public:
  // The ranks of each node. For `seed`, see Fibers.
  using Nodes = std::vector<std::vector<int>>;
  World(const Nodes& nodes, const Layout& layout, unsigned seed = 0);
  World(int ranks, const Layout& layout, unsigned seed = 0);

  // Runs the steps once. Throws a Violation if a check fails.
  void run(const std::vector<Step>& steps, const Fault& fault = {});
  // The number of a rank's waits in a step of that run.
  int waits(int rank, std::size_t step) const { return result(rank, step).waits; }
  int size() const { return static_cast<int>(ranks_.size()); }

 private:
  struct Tensors {
    std::byte* input;
    std::byte* output;
  };
  struct Rank {
    Thread* thread;
    std::unique_ptr<Comm> comm;
    std::unique_ptr<cpu::InternodeGroup> internode;
    Tensors window, own;
    std::byte* areas[2];
    std::byte* scratch;
    std::byte* residual;
    std::byte* sums;
  };
  struct Result {
    bool succeeded = false;
    int waits = 0;
    Pieces output, residual;
    std::array<std::size_t, kChannels> signalled;
  };

  Thread* add_thread(int process, const std::string& name);
  void add_node(const std::vector<int>& ranks, const Layout& layout);
  void add_links(const Nodes& nodes);
  std::int64_t residual_bytes(const Step& step) const;
  void make_tensors(const std::vector<Step>& steps);
  Rank& rank(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  Result& result(int r, std::size_t step) { return results_[step][static_cast<std::size_t>(r)]; }
  const Result& result(int r, std::size_t step) const {
    return results_[step][static_cast<std::size_t>(r)];
  }

  void live(int r, const std::vector<Step>& steps, const Fault& fault);
  Buffers buffers(int r, const Step& step);
  // What the caller does before an operation and after a failure.
  void fill(int r, const Step& step, int operation);
  void execute(int r, const Step& step);
  void retreat(int r);
  void check_half_done(int r, const Step& step);
  Result result_of(int r, const Step& step);

  void check(const Step& step, std::size_t index) const;
  void check_output(const Step& step, std::size_t index, int r) const;
  void check_residuals(const Step& step, std::size_t index) const;

  Symbols symbols_;
  std::vector<std::unique_ptr<Thread>> threads_;
  Memory memory_;
  Fibers fibers_;
  std::vector<std::unique_ptr<Node>> memories_;
  std::vector<std::unique_ptr<cpu::Network>> networks_;
  std::vector<Rank> ranks_;
  const Nodes nodes_;
  std::vector<std::vector<Result>> results_;  // by step and rank
};

std::string describe(const Step& step, std::size_t index);

}  // namespace pycomm::checker

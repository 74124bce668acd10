// The executor of top-k, as cpu/topk_comm.h is the CPU's: ranks exchange lists, in areas laid out by
// core/topk.h. Which elements a list holds does not matter here: it stands for its whole region.
#pragma once

#include "checker/comm.h"
#include "core/topk.h"
#include "core/topk_exchange.h"

namespace pycomm::checker {

class TopkComm {
 public:
  // `comm` has begun the operation with this rank's area for a tensor.
  TopkComm(Comm& comm, const Operation& operation, std::byte* input, std::byte* output)
      : comm_(comm), area_(operation, comm.size()), input_(input), output_(output) {}

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  void announce() { comm_.announce(); }
  void signal(int channel) { comm_.signal(channel); }
  void wait_all(int channel, std::int64_t step) { comm_.wait_all(channel, step); }

  void stage(int owner) {
    const TopkRegion region = area_.region(owner);
    for (std::int64_t j = 0; j < region.chunks(); ++j) {
      const Range chunk = region.chunk(j);
      const Place from = comm_.at({input_, rank()}, chunk.begin);
      const Pieces found = comm_.read(from, chunk.count, comm_.unit());
      if (j == 0) write(owner, found[0], false);
    }
  }

  void reduce() {
    std::vector<Pieces> lists;
    for (int r = 0; r < size(); ++r) lists.push_back(read(r, rank(), false));
    if (!lists[0].empty()) write(rank(), comm_.sum(lists, true)[0], true);
  }

  void gather(int owner) {
    const TopkRegion region = area_.region(owner);
    const Pieces found = read(owner, owner, true);
    for (std::int64_t j = 0; j < region.chunks(); ++j) {
      const Range chunk = region.chunk(j);
      const Place to = comm_.at({output_, rank()}, chunk.begin);
      comm_.write(to, {{chunk.count, found[0].symbol, chunk.begin}}, comm_.unit());
    }
  }

 private:
  // A list as one unit that stands for a region.
  Unit unit(int owner, bool result) const { return {area_.room(owner, result)}; }
  Place list(int r, int owner, bool result) const {
    return comm_.at({comm_.input(r).data, r},
                    (result ? area_.result() : area_.list(owner)) / comm_.unit().bytes);
  }
  bool exists(int owner) const { return area_.region(owner).chunks() > 0; }

  Pieces read(int r, int owner, bool result) {
    if (!exists(owner)) return {};
    const Pieces found = comm_.read(list(r, owner, result), 1, unit(owner, result));
    if (found[0].element != owner) throw Violation("a list is of another region");
    return found;
  }
  void write(int owner, const Piece& list_of, bool result) {
    const Piece lossy{1, comm_.symbols().lossy(list_of.symbol), owner};
    comm_.write(list(rank(), owner, result), {lossy}, unit(owner, result));
  }

  Comm& comm_;
  const TopkArea area_;
  std::byte* const input_;
  std::byte* const output_;
};

static_assert(ListExecutor<TopkComm>);

}  // namespace pycomm::checker

// All orders in which fibers can run that differ from the simplest one so many times. In the simplest one
// a fiber goes on for as long as it can, and then the next one does; to pass over one that could have run
// is a delay. Reference: Emmi, Qadeer and Rakamaric 2011, "Delay-bounded scheduling".
#pragma once

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "checker/fibers.h"

namespace pycomm::checker {

class Explorer {
 public:
  explicit Explorer(std::size_t delays) : most_delays_(delays) {}

  // Whether there is another order; the next run follows it.
  bool next() {
    delays_ = depth_ = 0;
    if (!std::exchange(started_, true)) return true;
    while (!trail_.empty() && trail_.back().chosen + 1 == trail_.back().options) trail_.pop_back();
    if (trail_.empty()) return false;
    ++trail_.back().chosen;
    return true;
  }

  // See Fibers.
  Fibers::Choice choice() {
    return [this](const std::vector<std::size_t>& ready, std::size_t current) {
      const auto simplest = std::lower_bound(ready.begin(), ready.end(), current);
      const auto first = static_cast<std::size_t>(simplest - ready.begin());
      const std::size_t options = std::min(ready.size(), most_delays_ - delays_ + 1);
      const std::size_t chosen = options == 1 ? 0 : decide(options);
      delays_ += chosen;
      return ready[(first + chosen) % ready.size()];
    };
  }

 private:
  struct Decision {
    std::size_t chosen;
    std::size_t options;
  };

  std::size_t decide(std::size_t options) {
    if (depth_ == trail_.size()) trail_.push_back({0, options});
    const Decision& decision = trail_[depth_++];
    if (decision.options != options) throw std::logic_error("a run could not be repeated");
    return decision.chosen;
  }

  const std::size_t most_delays_;
  std::size_t delays_ = 0;
  std::vector<Decision> trail_;
  std::size_t depth_ = 0;
  bool started_ = false;
};

}  // namespace pycomm::checker

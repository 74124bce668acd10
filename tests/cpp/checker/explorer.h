// Enumerates the orders in which fibers can run. In the simplest order, a fiber runs for as long as
// it can, then the next one does. To skip a fiber that could have run is a delay. The explorer
// enumerates either all orders with up to a given number of delays, or one order of each kind. Two
// orders are of the same kind if conflicting accesses (to the same place, at least one a write)
// come in the same order.
//
// For one order of each kind: a fiber whose next piece has been tried at some point sleeps
// afterwards until another fiber's piece conflicts with it. References: Emmi, Qadeer and Rakamaric
// 2011, "Delay-bounded scheduling"; Godefroid 1996, "Partial-order methods for the verification of
// concurrent systems".
#pragma once

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "checker/fibers.h"

namespace pycomm::checker {

class Explorer {
 public:
  static constexpr std::size_t kAll = ~std::size_t{0};
  // `delays` is the maximum, or kAll for one order of each kind.
  explicit Explorer(std::size_t delays) : most_delays_(delays) {}

  // True if there is another order, which the next run follows.
  bool next() {
    delays_ = depth_ = 0;
    redundant_ = false;
    piece_.clear();
    ++runs_;
    if (!std::exchange(started_, true)) return true;
    while (!trail_.empty() && !advance(trail_.back())) trail_.pop_back();
    return !trail_.empty();
  }
  std::size_t runs() const { return runs_ - 1; }

  // Records that the running fiber accesses a place.
  void touch(const volatile void* place, bool writes) { piece_[place] |= writes; }

  // The choice for Fibers.
  Fibers::Choice choice() {
    return [this](const std::vector<std::size_t>& ready, std::size_t current) {
      const auto simplest = std::lower_bound(ready.begin(), ready.end(), current);
      const auto first = static_cast<std::size_t>(simplest - ready.begin());
      std::vector<std::size_t> options;
      for (std::size_t i = 0; i < ready.size(); ++i) {
        options.push_back(ready[(first + i) % ready.size()]);
      }
      if (most_delays_ == kAll) return one_of_each_kind(std::move(options));
      options.resize(std::min(ready.size(), most_delays_ - delays_ + 1));
      const std::size_t chosen = options.size() == 1 ? 0 : decide(std::move(options), {}).chosen;
      delays_ += chosen;
      return ready[(first + chosen) % ready.size()];
    };
  }

 private:
  using Piece = std::map<const volatile void*, bool>;  // place -> whether it is written
  using Sleep = std::map<std::size_t, Piece>;          // by fiber
  struct Decision {
    std::vector<std::size_t> options;
    std::size_t chosen = 0;
    Sleep sleep = {};
  };

  static bool conflict(const Piece& a, const Piece& b) {
    return std::any_of(a.begin(), a.end(), [&](const auto& access) {
      const auto found = b.find(access.first);
      return found != b.end() && (access.second || found->second);
    });
  }

  // Advances to the next option that is not asleep; false if there is none.
  bool advance(Decision& decision) const {
    const auto& options = decision.options;
    while (++decision.chosen < options.size()) {
      if (!decision.sleep.contains(options[decision.chosen])) return true;
    }
    return false;
  }

  Decision& decide(std::vector<std::size_t> options, Sleep sleep) {
    if (depth_ == trail_.size()) {
      trail_.push_back({std::move(options), 0, std::move(sleep)});
    } else if (trail_[depth_].options != options) {
      throw std::logic_error("a run could not be repeated");
    }
    return trail_[depth_++];
  }

  std::size_t one_of_each_kind(std::vector<std::size_t> options) {
    const Piece piece = std::exchange(piece_, {});
    Sleep sleep;
    if (redundant_) return options[0];
    if (depth_ > 0) {
      Decision& last = trail_[depth_ - 1];
      for (const auto& [fiber, asleep] : last.sleep) {
        if (fiber != last.options[last.chosen] && !conflict(asleep, piece)) sleep[fiber] = asleep;
      }
      last.sleep[last.options[last.chosen]] = piece;
    }
    const auto awake = std::find_if(options.begin(), options.end(),
                                    [&](std::size_t fiber) { return !sleep.contains(fiber); });
    redundant_ = redundant_ || awake == options.end();
    if (redundant_) return options[0];  // finish the run in any order
    const auto chosen = static_cast<std::size_t>(awake - options.begin());
    const bool is_new = depth_ == trail_.size();
    Decision& decision = decide(std::move(options), std::move(sleep));
    if (is_new) decision.chosen = chosen;
    return decision.options[decision.chosen];
  }

  const std::size_t most_delays_;
  std::size_t delays_ = 0;
  std::vector<Decision> trail_;
  std::size_t depth_ = 0;
  std::size_t runs_ = 0;
  Piece piece_;
  bool redundant_ = false;
  bool started_ = false;
};

}  // namespace pycomm::checker

// Symbols for values: which contributions have been added, in which order, and where they were
// rounded. Two values with the same symbol have the same bits.
#pragma once

#include <compare>
#include <map>
#include <string>
#include <vector>

namespace pycomm::checker {

using Symbol = int;

struct Contribution {
  int operation;
  int rank;
  auto operator<=>(const Contribution&) const = default;
};

// The neutral contribution.
inline constexpr Contribution kZero{-1, -1};

class Symbols {
 public:
  Symbol contribution(const Contribution& contribution);
  // The terms, added in this order and rounded. `last`: AVG has divided, and nothing will be added.
  Symbol sum(const std::vector<Symbol>& terms, bool last);
  // The value after encoding and decoding.
  Symbol lossy(Symbol value);

  // All contributions, in the order of the additions.
  std::vector<Contribution> contributions(Symbol symbol) const;
  std::string text(Symbol symbol) const;

 private:
  enum class Kind { contribution, sum, total, lossy };
  struct Node {
    Kind kind;
    std::vector<int> parts;  // contribution: operation and rank; otherwise symbols
    auto operator<=>(const Node&) const = default;
  };
  Symbol number_of(const Node& node);
  const Node& node(Symbol symbol) const { return *nodes_[static_cast<std::size_t>(symbol)]; }

  std::map<Node, Symbol> numbers_;
  std::vector<const Node*> nodes_;
};

}  // namespace pycomm::checker

// What a value is made of, as a symbol: whose contributions have been added, in which order, and where
// they were rounded. Two values of the same symbol have the same bits.
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

// What is added to nothing.
inline constexpr Contribution kZero{-1, -1};

class Symbols {
 public:
  Symbol contribution(const Contribution& contribution);
  // The terms, added in this order and rounded; `last`: AVG has divided, nothing is added any more.
  Symbol sum(const std::vector<Symbol>& terms, bool last);
  // Encoded and decoded again.
  Symbol lossy(Symbol value);

  // All contributions in the order of additions.
  std::vector<Contribution> contributions(Symbol symbol) const;
  std::string text(Symbol symbol) const;

 private:
  enum class Kind { contribution, sum, total, lossy };
  struct Node {
    Kind kind;
    std::vector<int> parts;  // of a contribution: operation and rank; otherwise symbols
    auto operator<=>(const Node&) const = default;
  };
  Symbol number_of(const Node& node);
  const Node& node(Symbol symbol) const { return *nodes_[static_cast<std::size_t>(symbol)]; }

  std::map<Node, Symbol> numbers_;
  std::vector<const Node*> nodes_;
};

}  // namespace pycomm::checker

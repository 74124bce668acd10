#include "checker/symbols.h"

namespace pycomm::checker {

Symbol Symbols::number_of(const Node& node) {
  const auto [place, is_new] = numbers_.emplace(node, static_cast<Symbol>(nodes_.size()));
  if (is_new) nodes_.push_back(&place->first);
  return place->second;
}

Symbol Symbols::contribution(const Contribution& contribution) {
  return number_of({Kind::contribution, {contribution.operation, contribution.rank}});
}

Symbol Symbols::sum(const std::vector<Symbol>& terms, bool last) {
  return number_of({last ? Kind::total : Kind::sum, terms});
}

Symbol Symbols::lossy(Symbol value) { return number_of({Kind::lossy, {value}}); }

std::vector<Contribution> Symbols::contributions(Symbol symbol) const {
  const Node& made = node(symbol);
  if (made.kind == Kind::contribution) return {{made.parts[0], made.parts[1]}};
  std::vector<Contribution> all;
  for (const Symbol part : made.parts) {
    const std::vector<Contribution> some = contributions(part);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

std::string Symbols::text(Symbol symbol) const {
  const Node& made = node(symbol);
  if (made.kind == Kind::contribution) {
    return std::to_string(made.parts[1]) + "@" + std::to_string(made.parts[0]);
  }
  std::string text = made.kind == Kind::lossy ? "~(" : made.kind == Kind::total ? "total(" : "(";
  for (const Symbol part : made.parts) {
    if (part != made.parts.front()) text += " + ";
    text += this->text(part);
  }
  return text + ")";
}

}  // namespace pycomm::checker

// The table of optimizer rules: one row per rule, in the order of Rule.
// docs/contributing/extending.md shows how to add one.
#pragma once

#include "core/optim/adamw.h"
#include "core/optim/lamb.h"
#include "core/optim/lion.h"
#include "core/optim/optimizer.h"
#include "core/optim/sgd.h"

namespace pycomm {

enum class Rule : std::uint8_t { adamw, sgd, lion, lamb };
template <>
struct Names<Rule> {
  static constexpr const char* all[] = {"adamw", "sgd", "lion", "lamb"};
};

// A row.
//   Elements  the element updates that the settings choose from; choice() returns the index of the
//             chosen one.
// A rule's first state is a first moment, which may be negative; the others are second moments, which
// are not. Formats narrower than fp32 depend on this.
struct AdamWRule {
  static constexpr Rule kRule = Rule::adamw;
  using Elements = TypeList<AdamW<false>, AdamW<true>>;
  static int choice(const Settings& settings) { return settings.amsgrad ? 1 : 0; }
};

struct SgdRule {
  static constexpr Rule kRule = Rule::sgd;
  using Elements = TypeList<Sgd<false>, Sgd<true>>;
  static int choice(const Settings& settings) { return settings.momentum != 0.0 ? 1 : 0; }
};

struct LionRule {
  static constexpr Rule kRule = Rule::lion;
  using Elements = TypeList<Lion>;
  static int choice(const Settings&) { return 0; }
};

struct LambRule {
  static constexpr Rule kRule = Rule::lamb;
  using Elements = TypeList<Lamb>;
  static int choice(const Settings&) { return 0; }
};

template <class... Rows>
struct RuleTable {
  static constexpr int kCount = sizeof...(Rows);

  // The index of the element update that the settings select, among those of their rule.
  static int choice(const Settings& settings) {
    return ((Rows::kRule == settings.rule ? Rows::choice(settings) : 0) + ...);
  }
  // Calls visit(row) with the rule's row.
  template <class Visit>
  static void visit_row(Rule rule, const Visit& visit) {
    (void)((Rows::kRule == rule && (visit(Rows{}), true)) || ...);
  }
  // Calls visit(std::type_identity<Element>{}) with the element update that the settings select.
  template <class Visit>
  static void visit(const Settings& settings, const Visit& visit) {
    (void)((Rows::kRule == settings.rule &&
            (Rows::Elements::visit(Rows::choice(settings), visit), true)) ||
           ...);
  }
};

using Rules = RuleTable<AdamWRule, SgdRule, LionRule, LambRule>;
static_assert(Rules::kCount == kCountOf<Rule>);

}  // namespace pycomm

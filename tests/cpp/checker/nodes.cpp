// The CPU's unchanged code between nodes, on replacements for the rest of cpu/ (checker/instead).
#include "cpu/internode/aggregate.cpp"
#include "cpu/internode/group.cpp"
#include "cpu/internode/relay.cpp"
#include "cpu/internode/stages.cpp"

namespace pycomm::cpu {

// Blocks go as messages, which have no replacement here.
void InternodeGroup::move_blocks(const Operation&, const Call&, p2p::Engine&, void (*)()) {
  throw checker::Violation("no messages");
}
void InternodeGroup::in_equal_blocks(const Operation&, const Call&) {
  throw checker::Violation("no blocks of different sizes");
}

}  // namespace pycomm::cpu

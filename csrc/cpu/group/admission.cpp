// Which calls a group can run, and what they would cost.
#include "core/cost.h"
#include "cpu/group/group.h"

namespace pycomm::cpu {

// Why a call cannot run; empty if it can.
std::string Group::refusal(const Call& call) const {
  const Operation& operation = call.operation;
  if (std::string why = refusal_of(call, size_); !why.empty()) return why;
  if (call.inputs || call.outputs) return refusal_of_blocks(call, size_);
  if (internode_ != nullptr) {
    const Algorithm algorithm = operation.algorithm;
    if (operation.collective != Collective::all_reduce ||
        (algorithm != Algorithm::one_shot && algorithm != Algorithm::multicast)) {
      return {};
    }
    return std::string(
               "algorithm must be auto, two_shot, ring or tree in a group that spans nodes, "
               "got ") +
           name_of(algorithm);
  }
  if (operation.algorithm == Algorithm::multicast && operation.device == Device::cpu) {
    return "algorithm must be auto, one_shot, two_shot, ring or tree for CPU tensors, got "
           "multicast: only switches between GPUs add";
  }
  if (operation.codec.kind == CodecKind::none || operation.codec.kind == CodecKind::topk) return {};
  const auto staging = CodedStaging::in(comm_.slot_bytes() * kStagingSlots, operation.codec);
  if (staging.piece(size_) > 0) return {};
  return "staging_bytes is too small to compress among " + std::to_string(size_) +
         " ranks: make the group with at least " + std::to_string(2 * staging.enough(size_));
}

// Checks a call's arguments before it starts.
void Group::check_fits(const Call& call) const {
  const std::string why = refusal(call);
  PYCOMM_CHECK(why.empty(), why);
}

int Group::matching_row(std::int64_t bytes) const {
  if (internode_ == nullptr) return -1;
  return pycomm::matching_row(algorithms_, internode_->nodes().count(), size_, bytes);
}

Traffic Group::cost(const Operation& operation, bool zero_copy) const {
  check_fits({operation});
  if (internode_ != nullptr) return {};
  return cost_of(operation, {rank_, size_, comm_.slot_bytes(), kPacketBytes, zero_copy});
}

std::vector<LinkTraffic> Group::cost_by_rank(const Operation& operation, bool zero_copy) const {
  check_fits({operation});
  const CostRank rank{comm_.rank(), comm_.size(), comm_.slot_bytes(), kPacketBytes, zero_copy};
  return pycomm::cost_by_rank(operation, rank);
}

std::vector<LinkTraffic> Group::link_cost_by_node(const Operation& operation) const {
  check_fits({operation});
  if (internode_ == nullptr) return {};
  return pycomm::link_cost_by_node(operation, internode_->nodes(), comm_.rank());
}

LinkTraffic Group::link_cost(const Operation& operation) const {
  check_fits({operation});
  if (internode_ == nullptr) return {};
  return pycomm::link_cost(operation, internode_->nodes(), comm_.rank());
}

}  // namespace pycomm::cpu

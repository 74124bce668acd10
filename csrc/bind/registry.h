// Groups by name, so that torch.ops can take a string where Python has an object.
#pragma once

#include <memory>
#include <string>

#include "cpu/group.h"

namespace pycomm::bind {

void register_group(const std::string& name, const std::shared_ptr<cpu::Group>& group);

// Throws std::invalid_argument where there is none (any more).
std::shared_ptr<cpu::Group> find_group(const std::string& name);

}  // namespace pycomm::bind

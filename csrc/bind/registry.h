// Groups by name, because torch.ops take strings, not group objects.
#pragma once

#include <memory>
#include <string>

#include "cpu/group/group.h"

namespace pycomm::bind {

void register_group(const std::string& name, const std::shared_ptr<cpu::Group>& group);

// Throws std::invalid_argument if no open group has this name.
std::shared_ptr<cpu::Group> find_group(const std::string& name);

}  // namespace pycomm::bind

#include "bind/registry.h"

#include <map>
#include <mutex>

namespace pycomm::bind {
namespace {

std::mutex mutex;
std::map<std::string, std::weak_ptr<cpu::Group>> groups;

}  // namespace

void register_group(const std::string& name, const std::shared_ptr<cpu::Group>& group) {
  const std::lock_guard lock(mutex);
  std::erase_if(groups, [](const auto& entry) { return entry.second.expired(); });
  groups[name] = group;
}

std::shared_ptr<cpu::Group> find_group(const std::string& name) {
  const std::lock_guard lock(mutex);
  const auto found = groups.find(name);
  const std::shared_ptr<cpu::Group> group = found == groups.end() ? nullptr : found->second.lock();
  PYCOMM_CHECK(group != nullptr, "group must name an open pycomm group, got '" + name + "'");
  return group;
}

}  // namespace pycomm::bind

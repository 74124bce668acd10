// References: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
#include "cpu/memory/memory.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace pycomm::cpu {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// The two versions of the interface differ in the files' places and names.
struct ControlGroups {
  const char* mount;
  const char* limit;
  const char* usage;
  // In memory.stat: counted as used, but freed on demand. Shared memory is in none of them.
  std::array<const char*, 3> reclaimable;
};
constexpr ControlGroups kVersion2{"sys/fs/cgroup",
                                  "memory.max",
                                  "memory.current",
                                  {"active_file", "inactive_file", "slab_reclaimable"}};
constexpr ControlGroups kVersion1{"sys/fs/cgroup/memory",
                                  "memory.limit_in_bytes",
                                  "memory.usage_in_bytes",
                                  {"total_active_file", "total_inactive_file"}};

std::optional<std::int64_t> number_in(const fs::path& file) {
  std::ifstream in(file);
  std::int64_t number = 0;
  if (in >> number) return number;
  return std::nullopt;  // not there, or the word "max"
}

// The sum of the numbers that follow one of the keys at the beginning of a line, if there are any.
template <std::size_t n>
std::optional<std::int64_t> sum_in(const fs::path& file, const std::array<const char*, n>& keys) {
  std::ifstream in(file);
  std::optional<std::int64_t> sum;
  std::string found, rest;
  for (std::int64_t number = 0; in >> found >> number; std::getline(in, rest)) {
    const auto wanted = [&](const char* key) { return key != nullptr && found == key; };
    if (std::any_of(keys.begin(), keys.end(), wanted)) sum = sum.value_or(0) + number;
  }
  return sum;
}

std::int64_t available_in(const fs::path& group, const ControlGroups& version) {
  const auto limit = number_in(group / version.limit), usage = number_in(group / version.usage);
  if (!limit || !usage) return kUnlimited;
  const std::int64_t reclaimable = sum_in(group / "memory.stat", version.reclaimable).value_or(0);
  return std::max<std::int64_t>(*limit - std::max<std::int64_t>(*usage - reclaimable, 0), 0);
}

// The bytes available in a control group and all of its ancestors. A container may see its own
// group as the outermost one, although its path does not exist here.
std::int64_t available_in_all(const fs::path& mount, fs::path group, const ControlGroups& version) {
  std::int64_t available = available_in(mount, version);
  for (; !group.empty(); group = group.parent_path()) {
    available = std::min(available, available_in(mount / group, version));
  }
  return available;
}

}  // namespace

std::int64_t available_memory(const fs::path& root) {
  const auto kib = sum_in(root / "proc/meminfo", std::array{"MemAvailable:"});
  std::int64_t available = kib ? *kib * 1024 : kUnlimited;
  // Lines of "number:controllers:/path"; version 2 has no controllers.
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = ',' + line.substr(first + 1, second - first - 1) + ',';
    const fs::path path = fs::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,") {
      available = std::min(available, available_in_all(root / kVersion2.mount, path, kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, available_in_all(root / kVersion1.mount, path, kVersion1));
    }
  }
  return available;
}

}  // namespace pycomm::cpu

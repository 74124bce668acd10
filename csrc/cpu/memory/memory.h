// The amount of memory that this process can still use.
#pragma once

#include <cstdint>
#include <filesystem>

namespace pycomm::cpu {

// The bytes that the node and all control groups of this process can provide before the kernel
// kills a process. Unlimited if there is no information. `root` is the file system's root, for
// tests.
std::int64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace pycomm::cpu

// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <filesystem>

namespace pycomm::cpu {

// Bytes that the node, and every control group that this process is in, can give without killing
// someone; unlimited if nothing says. `root`: of the file system, for tests.
std::int64_t available_memory(const std::filesystem::path& root = "/");

}  // namespace pycomm::cpu

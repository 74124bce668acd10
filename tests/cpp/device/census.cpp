#include "census.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

namespace device {
namespace {

// Empty when the test begins. Processes that the test forks append to the same file.
const int file = [] {
  const char* const path = std::getenv("PYCOMM_CENSUS");
  return path == nullptr ? -1 : open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0644);
}();
std::mutex mutex;
std::set<const void*> counted;

}  // namespace

void count_launch(const void* kernel) {
  if (file < 0) return;
  const std::lock_guard lock(mutex);
  if (!counted.insert(kernel).second) return;
  Dl_info executable;
  dladdr(kernel, &executable);
  dprintf(file, "%tx\n",
          static_cast<const std::byte*>(kernel) - static_cast<std::byte*>(executable.dli_fbase));
}

}  // namespace device

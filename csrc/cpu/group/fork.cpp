#include "cpu/group/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/memory/memory.h"

namespace pycomm::cpu {
namespace {

std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

std::atomic<unsigned> forks{0};

// A socket's descriptor, and the number by which the system knows it.
struct Socket {
  int fd;
  ino_t inode;

  bool still_open() const {
    struct stat now = {};
    return fstat(fd, &now) == 0 && S_ISSOCK(now.st_mode) && now.st_ino == inode;
  }
};

// Shared pages of this process.
struct Pages {
  std::int64_t bytes;
  int fd;
  std::int64_t position;
  std::int64_t copied_at = -1;  // where they lie in the copy
};

// What this process has and its children must not have. Never destroyed, because threads may still
// use it while the process ends.
struct Inheritance {
  std::mutex mutex;
  std::vector<Socket> sockets;
  std::map<std::byte*, Pages> pages;
  std::byte* copy = nullptr;
  std::int64_t copied = 0;  // its bytes
  bool held = false;        // for a fork that is about to happen
};
auto& own = *new Inheritance;
std::atomic<bool> has_copy{false};
thread_local bool uses_copy = false;

void drop_copy() {
  if (own.copy != nullptr) munmap(own.copy, size(own.copied));
  own.copy = nullptr;
  has_copy = false;
  for (auto& [data, pages] : own.pages) pages.copied_at = -1;
}

bool copy_is_current() {
  return own.copy != nullptr && std::all_of(own.pages.begin(), own.pages.end(), [](const auto& p) {
           const auto& [data, pages] = p;
           return pages.copied_at >= 0 &&
                  std::memcmp(data, own.copy + pages.copied_at, size(pages.bytes)) == 0;
         });
}

bool make_copy() {
  std::int64_t total = 0;
  for (const auto& [data, pages] : own.pages) total += pages.bytes;
  if (total == 0) return true;
  if (!suffices_for_copy(total, available_memory())) return false;
  void* const memory = mmap(nullptr, size(total), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  own.copy = static_cast<std::byte*>(memory);
  own.copied = total;
  has_copy = true;
  std::int64_t end = 0;
  for (auto& [data, pages] : own.pages) {
    for (std::int64_t at = 0; at < pages.bytes; at += kCopiedPortion) {
      if (!suffices_for_copy(total - end - at, available_memory())) {
        drop_copy();
        return false;
      }
      std::memcpy(own.copy + end + at, data + at, size(std::min(kCopiedPortion, pages.bytes - at)));
    }
    pages.copied_at = std::exchange(end, end + pages.bytes);
  }
  return true;
}

// Code that runs in a child allocates no memory, and takes no lock except the one that its parent
// took for it.

void put_null_in_place_of(const Socket& socket, int null) {
  // Keeps the number in use, so that it cannot become another file while a library takes it for its
  // socket.
  if (null < 0 || dup3(null, socket.fd, O_CLOEXEC) < 0) close(socket.fd);
}

void close_sockets() {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const Socket& socket : own.sockets) {
    if (socket.still_open()) put_null_in_place_of(socket, null);
  }
  if (null >= 0) close(null);
}

void make_private(std::byte* data, const Pages& pages, bool from_copy) {
  if (from_copy && pages.copied_at >= 0 &&
      mremap(own.copy + pages.copied_at, size(pages.bytes), size(pages.bytes),
             MREMAP_MAYMOVE | MREMAP_FIXED, data) != MAP_FAILED) {
    return;
  }
  if (mmap(data, size(pages.bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
           pages.fd, pages.position) != MAP_FAILED) {
    return;
  }
  if (mprotect(data, size(pages.bytes), PROT_READ) == 0) return;  // a write faults
  constexpr std::string_view kWhy =
      "pycomm: cannot give a forked child its own copies of tensors: the child aborts\n";
  (void)!write(STDERR_FILENO, kWhy.data(), kWhy.size());
  std::abort();  // it would write to its parent's tensors
}

void begin_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  close_sockets();
  const bool from_copy = std::exchange(uses_copy, false);
  for (const auto& [data, pages] : own.pages) make_private(data, pages, from_copy);
  if (own.copy != nullptr) munmap(own.copy, size(own.copied));  // what is left of it
  own.sockets.clear();
  own.pages.clear();
  own.copy = nullptr;
  own.held = false;
  has_copy = false;
  own.mutex.unlock();
}

void go_on_in_parent() {
  if (std::exchange(uses_copy, false)) own.held = false;
  own.mutex.unlock();
}

// Registered when the library is loaded, so that no fork is missed.
[[maybe_unused]] const int forks_handled =
    pthread_atfork([] { own.mutex.lock(); }, go_on_in_parent, begin_child);

}  // namespace

unsigned current_forks() { return forks.load(std::memory_order_relaxed); }

void close_in_children(std::span<const int> sockets) {
  const std::lock_guard lock(own.mutex);
  std::erase_if(own.sockets, [](const Socket& socket) { return !socket.still_open(); });
  for (const int fd : sockets) {
    struct stat now = {};
    if (fstat(fd, &now) == 0 && S_ISSOCK(now.st_mode)) own.sockets.push_back({fd, now.st_ino});
  }
}

void make_private_in_children(std::byte* data, std::int64_t bytes, int fd, std::int64_t position) {
  const std::lock_guard lock(own.mutex);
  own.pages[data] = {bytes, fd, position};
}

void leave_as_is_in_children(std::byte* data, std::int64_t bytes,
                             const std::function<void()>& replace) {
  const std::lock_guard lock(own.mutex);
  replace();
  std::byte* const end = data + bytes;
  auto next = own.pages.lower_bound(data);
  if (next != own.pages.begin()) --next;  // it may reach into the range
  while (next != own.pages.end() && next->first < end) {
    const auto [begin, pages] = *next;
    std::byte* const pages_end = begin + pages.bytes;
    if (pages_end <= data) {
      ++next;
      continue;
    }
    next = own.pages.erase(next);
    if (begin < data) own.pages[begin] = {data - begin, pages.fd, pages.position};
    if (end < pages_end) {
      own.pages[end] = {pages_end - end, pages.fd, pages.position + (end - begin)};
    }
  }
}

bool suffices_for_copy(std::int64_t left, std::int64_t available) {
  constexpr std::int64_t kRanks = 16;  // that copy a portion at the same time
  return left + (kRanks - 1) * std::min(left, kCopiedPortion) <= available;
}

bool copy_at_fork() {
  const std::lock_guard lock(own.mutex);
  if (!copy_is_current()) {
    drop_copy();
    if (!make_copy()) return false;
  }
  uses_copy = own.held = true;
  return true;
}

void drop_copy_for_children() {
  if (!has_copy.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(own.mutex);
  if (!own.held) drop_copy();
}

}  // namespace pycomm::cpu

#include "cpu/window.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <system_error>

#include "core/layout.h"
#include "cpu/fork.h"

namespace pycomm::cpu {
namespace {

[[noreturn]] void fail(const char* call) {
  throw std::system_error(errno, std::generic_category(), std::string(call) + PYCOMM_WHERE);
}

// What the machine can give without killing someone; unlimited where it does not say.
std::int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  for (std::int64_t kib = 0; meminfo >> key >> kib; std::getline(meminfo, unit)) {
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<std::int64_t>::max();
}

void reserve_file(int fd, std::int64_t offset, std::int64_t bytes) {
  const std::int64_t available = available_bytes();
  if (bytes > available) {
    throw OutOfMemory("the shared window needs " + std::to_string(bytes) +
                      " bytes, the machine has " + std::to_string(available));
  }
  while (fallocate(fd, 0, offset, bytes) != 0) {
    if (errno == EINTR) continue;
    if (errno == ENOSPC || errno == ENOMEM) {
      throw OutOfMemory("no memory for " + std::to_string(bytes) +
                        " bytes of shared window: " + std::strerror(errno));
    }
    fail("fallocate");
  }
}

// Anonymous, not inherited by exec, and never executable where the kernel knows the last flag.
int make_file() {
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, of Linux 6.3
  const int fd = memfd_create("pycomm", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create("pycomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

void write_header(int fd, const Header& header) {
  if (pwrite(fd, &header, sizeof(Header), 0) != static_cast<ssize_t>(sizeof(Header))) {
    fail("pwrite");
  }
}

Header read_header(int fd) {
  Header header{};
  if (pread(fd, &header, sizeof(Header), 0) < 0) fail("pread");
  return header;
}

std::int64_t size_of_file(int fd) {
  struct stat status = {};
  if (fstat(fd, &status) != 0) fail("fstat");
  return status.st_size;
}

// Throws unless the file is the window that this rank expects.
void check_file(int fd, const Header& expected) {
  const Header found = read_header(fd);
  PYCOMM_CHECK(found.magic == kMagic, "the file is no window of pycomm's");
  const auto check = [](const char* what, auto value, auto wanted) {
    PYCOMM_CHECK(value == wanted, "the window's " + std::string(what) + " is " +
                                      std::to_string(value) + ", this rank's is " +
                                      std::to_string(wanted));
  };
  check("layout", found.layout, expected.layout);
  check("number of ranks", found.ranks, expected.ranks);
  check("slice_bytes", found.slice_bytes, expected.slice_bytes);
  check("staging_bytes", found.staging_bytes, expected.staging_bytes);
  check("size", size_of_file(fd), expected.ranks * expected.slice_bytes);
}

}  // namespace

int Window::create(int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes) {
  const int fd = make_file();
  if (fd < 0) fail("memfd_create");
  try {
    if (fchmod(fd, 0600) != 0) fail("fchmod");
    if (ftruncate(fd, ranks * slice_bytes) != 0) fail("ftruncate");
    for (int r = 0; r < ranks; ++r) {
      reserve_file(fd, r * slice_bytes, kControlBytes + packet_area_bytes(ranks) + staging_bytes);
    }
    // Its size is final: a rank that has compared it once meets no SIGBUS later.
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("F_ADD_SEALS");
    write_header(fd, {kMagic, kLayout, ranks, slice_bytes, staging_bytes});
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

Window::Window(int fd, int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes)
    : fd_(fd), ranks_(ranks), slice_bytes_(slice_bytes), half_bytes_(staging_bytes / 2) {
  try {
    check_file(fd, {kMagic, kLayout, ranks, slice_bytes, staging_bytes});
    void* base = mmap(nullptr, static_cast<std::size_t>(ranks * slice_bytes),
                      PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) fail("mmap");
    base_ = static_cast<std::byte*>(base);
    // Dumping a core would fill every hole with zeros, up to the size of all memory.
    (void)madvise(base, static_cast<std::size_t>(ranks * slice_bytes), MADV_DONTDUMP);
  } catch (...) {
    close(fd_);
    throw;
  }
#if defined(MADV_POPULATE_WRITE)
  // Only a head start: older kernels fault the pages in at first use.
  for (int r = 0; r < ranks; ++r) {
    (void)madvise(slice(r), static_cast<std::size_t>(heap_begin()), MADV_POPULATE_WRITE);
  }
#endif
}

Window::~Window() {
  munmap(base_, static_cast<std::size_t>(ranks_ * slice_bytes_));
  close(fd_);
}

void Window::reserve(int r, std::int64_t offset, std::int64_t bytes) {
  reserve_file(fd_, r * slice_bytes_ + offset, bytes);
}

void Window::detach(int r, const Range& pages) {
  std::byte* const data = slice(r) + pages.begin;
  if (mmap(data, static_cast<std::size_t>(pages.count), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_FIXED, fd_, r * slice_bytes_ + pages.begin) == MAP_FAILED) {
    fail("mmap");
  }
  // A private page is the file's until it is written to. Other threads of this process may be
  // writing to it, too: an atomic write of what is there already loses nothing of theirs.
  for (std::int64_t page = 0; page < pages.count; page += kPage) {
    reinterpret_cast<volatile std::atomic<std::uint32_t>*>(data + page)->fetch_or(0);
  }
}

void Window::release(int r, std::int64_t offset, std::int64_t bytes) {
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, r * slice_bytes_ + offset,
                  bytes);
}

struct flock Window::lock_of(int r) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = r * slice_bytes_;
  lock.l_len = 1;
  return lock;
}

bool Window::hold(int r) const {
  struct flock lock = lock_of(r);
  return fcntl(fd_, F_SETLK, &lock) == 0;
}

bool Window::held(int r) const {
  struct flock lock = lock_of(r);
  return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

Heap::Heap(std::shared_ptr<Window> window, int rank)
    : window_(std::move(window)), rank_(rank), forks_(current_forks()) {
  const std::int64_t begin = round_up(window_->heap_begin(), kPage);
  free_[begin] = window_->slice_bytes() - begin;
}

std::byte* Heap::allocate(std::int64_t bytes) {
  PYCOMM_CHECK(bytes >= 0, "bytes must not be negative, got " + std::to_string(bytes));
  const std::int64_t size = round_up(bytes > 0 ? bytes : 1, kPage);
  const std::lock_guard lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [offset, room] = *range;
    if (room < size) continue;
    window_->reserve(rank_, offset, size);
    free_.erase(range);
    if (room > size) free_[offset + size] = room - size;
    used_[offset] = size;
    return window_->slice(rank_) + offset;
  }
  throw OutOfMemory("the window's heap has no " + std::to_string(bytes) + " bytes left");
}

void Heap::free(std::byte* data) {
  if (forks_ != current_forks()) return;  // the memory is the parent's
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(data - window_->slice(rank_));
  PYCOMM_CHECK(used != used_.end(), "not an allocation of this heap");
  auto [offset, size] = *used;
  used_.erase(used);
  window_->release(rank_, offset, size);
  // Joins its neighbours.
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_[offset] = size;
}

}  // namespace pycomm::cpu

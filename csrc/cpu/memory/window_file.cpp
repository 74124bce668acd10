#include "cpu/memory/window_file.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/layout.h"
#include "cpu/memory/memory.h"

namespace pycomm::cpu {
namespace {

// Smaller reservations do not check the available memory, because the check would take longer than
// the rest.
constexpr std::int64_t kAskFrom = 1 << 20;

// Memory is reserved in pieces: some kernels undo the whole call when a signal arrives, so a timer
// could prevent a large one for ever.
constexpr std::int64_t kPiece = 64 << 20;

// Makes an anonymous file that exec does not inherit, and that is not executable if the kernel
// knows the last flag.
int make_file(const char* name) {
  constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL, of Linux 6.3
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd >= 0 || errno != EINVAL) return fd;
  return memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

// The limit also holds for files in memory. Python ignores the signal that comes with the error.
[[noreturn]] void throw_too_large(std::int64_t bytes) {
  rlimit most = {};
  (void)getrlimit(RLIMIT_FSIZE, &most);
  throw std::system_error(EFBIG, std::generic_category(),
                          "shared memory needs a file of " + std::to_string(bytes) +
                              " bytes, of which only reserved parts take memory; the limit on the "
                              "size of files (ulimit -f, RLIMIT_FSIZE) is " +
                              std::to_string(most.rlim_cur) + " bytes");
}

// Identifies a file without a name, the same in all processes.
std::uint32_t inode_of(int fd) {
  struct stat file = {};
  return fstat(fd, &file) == 0 ? static_cast<std::uint32_t>(file.st_ino) : 0;
}

}  // namespace

void throw_errno(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

int make_window_file(std::int64_t bytes, const char* name) {
  const int fd = make_file(name);
  if (fd < 0) throw_errno("memfd_create");
  if (fchmod(fd, 0600) == 0 && ftruncate(fd, bytes) == 0) return fd;
  const int error = errno;
  close(fd);
  if (error == EFBIG) throw_too_large(bytes);
  errno = error;
  throw_errno("fchmod or ftruncate");
}

void reserve_in_file(int fd, std::int64_t position, std::int64_t bytes) {
  const std::int64_t available = bytes < kAskFrom ? bytes : available_memory();
  if (bytes > available) {
    throw OutOfMemory("the shared window needs " + std::to_string(bytes) +
                      " bytes, the node or its control group has " + std::to_string(available));
  }
  for (std::int64_t done = 0; done < bytes;) {
    const std::int64_t piece = std::min(bytes - done, kPiece);
    if (fallocate(fd, 0, position + done, piece) == 0) {
      done += piece;
    } else if (errno == ENOSPC || errno == ENOMEM) {
      throw OutOfMemory("no memory for " + std::to_string(bytes) +
                        " bytes of shared window: " + std::strerror(errno));
    } else if (errno != EINTR) {
      throw_errno("fallocate");
    }
  }
}

WindowFile::WindowFile(int fd, int slices, const Range& heap)
    : fd_(fd), id_(inode_of(fd)), slices_(slices), heap_(heap) {
  for (int s = 0; s < slices; ++s) {
    maps_.emplace_back(fd, position(s, 0), heap);
    heaps_.emplace_back(*this, s);
  }
}

WindowFile::~WindowFile() { close(fd_); }

std::byte* WindowFile::allocate(int s, const Range& pages) {
  const std::int64_t begin = position(s, pages.begin);
  try {
    reserve_in_file(fd_, begin, pages.count);
    return map(s).map(pages);
  } catch (...) {
    punch(begin, pages.count);
    throw;
  }
}

bool WindowFile::release(int s, const Range& pages) {
  const bool reusable = map(s).unmap(pages.begin);
  punch(position(s, pages.begin), pages.count);
  return reusable;
}

void WindowFile::punch(std::int64_t position, std::int64_t bytes) const {
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, position, bytes);
}

void WindowFile::detach(int s, const Range& pages) { map(s).detach(pages); }

struct flock WindowFile::lock_of(int s) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = s * slice_bytes();
  lock.l_len = 1;
  return lock;
}

bool WindowFile::hold(int s) const {
  struct flock lock = lock_of(s);
  return fcntl(fd_, F_SETLK, &lock) == 0;
}

bool WindowFile::held(int s) const {
  struct flock lock = lock_of(s);
  return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void WindowFile::write(std::int64_t position, const void* data, std::size_t bytes) const {
  if (pwrite(fd_, data, bytes, position) == static_cast<ssize_t>(bytes)) return;
  if (errno == ENOSPC || errno == ENOMEM) throw OutOfMemory("no memory for a shared window");
  throw_errno("pwrite");
}

bool WindowFile::lasts(const Tenancy& tenancy) const {
  std::uint64_t word = 0;
  return pread(fd_, &word, sizeof(word), tenancy.position) != sizeof(word) || word == tenancy.id;
}

}  // namespace pycomm::cpu

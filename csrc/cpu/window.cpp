#include "cpu/window.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/layout.h"
#include "cpu/memory.h"

namespace pycomm::cpu {
namespace {

[[noreturn]] void fail(const char* call) {
  throw std::system_error(errno, std::generic_category(), std::string(call) + PYCOMM_WHERE);
}

// Smaller reservations do not check the available memory, because the check would take longer than
// the rest.
constexpr std::int64_t kAskFrom = 1 << 20;

void reserve_file(int fd, std::int64_t offset, std::int64_t bytes) {
  const std::int64_t available = bytes < kAskFrom ? bytes : available_memory();
  if (bytes > available) {
    throw OutOfMemory("the shared window needs " + std::to_string(bytes) +
                      " bytes, the node or its control group has " + std::to_string(available));
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

void punch_hole(int fd, std::int64_t begin, std::int64_t bytes) {
  (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, bytes);
}

// Makes an anonymous file that exec does not inherit, and that is not executable if the kernel
// knows the last flag.
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

// Identifies a file without a name, the same in all processes.
std::uint32_t inode_of(int fd) {
  struct stat file = {};
  return fstat(fd, &file) == 0 ? static_cast<std::uint32_t>(file.st_ino) : 0;
}

}  // namespace

int Window::create(int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes) {
  const int fd = make_file();
  if (fd < 0) fail("memfd_create");
  try {
    if (fchmod(fd, 0600) != 0) fail("fchmod");
    if (ftruncate(fd, ranks * slice_bytes) != 0) fail("ftruncate");
    reserve_file(fd, 0, ranks * cpu::heap_begin(ranks, staging_bytes));
    // The size is final, so a rank that has checked it once meets no SIGBUS later.
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("F_ADD_SEALS");
    write_header(fd, {kMagic, kLayout, ranks, slice_bytes, staging_bytes});
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

Window::Window(int fd, int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes)
    : fd_(fd),
      id_(inode_of(fd)),
      ranks_(ranks),
      slice_bytes_(slice_bytes),
      half_bytes_(staging_bytes / 2),
      heap_begin_(cpu::heap_begin(ranks, staging_bytes)) {
  try {
    check_file(fd, {kMagic, kLayout, ranks, slice_bytes, staging_bytes});
    fixed_.emplace(fd, 0, ranks * heap_begin_);
  } catch (...) {
    close(fd_);
    throw;
  }
  for (int r = 0; r < ranks; ++r) {
    heaps_.emplace_back(fd_, begin_in_file(r), Range{heap_begin_, slice_bytes_ - heap_begin_});
  }
}

void Window::populate([[maybe_unused]] int r) {
#if defined(MADV_POPULATE_WRITE)
  // Only an optimisation: older kernels fault the pages in at first use.
  (void)madvise(fixed_->data() + r * heap_begin_, static_cast<std::size_t>(heap_begin_),
                MADV_POPULATE_WRITE);
#endif
}

Window::~Window() { close(fd_); }

std::byte* Window::allocate(int r, const Range& pages) {
  const std::int64_t begin = begin_in_file(r) + pages.begin;
  reserve_file(fd_, begin, pages.count);
  try {
    return heap(r).map(pages);
  } catch (...) {
    punch_hole(fd_, begin, pages.count);
    throw;
  }
}

void Window::release(int r, const Range& pages) {
  heap(r).unmap(pages.begin);
  punch_hole(fd_, begin_in_file(r) + pages.begin, pages.count);
}

void Window::detach(int r, const Range& pages) {
  std::byte* const data = heap(r).at(pages.begin, pages.count);
  if (mmap(data, static_cast<std::size_t>(pages.count), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_FIXED, fd_, begin_in_file(r) + pages.begin) == MAP_FAILED) {
    fail("mmap");
  }
  // A private page remains the file's until it is written to. Other threads of this process may be
  // writing to it. An atomic write of the present value loses none of their data.
  for (std::int64_t page = 0; page < pages.count; page += kPage) {
    reinterpret_cast<volatile std::atomic<std::uint32_t>*>(data + page)->fetch_or(0);
  }
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

}  // namespace pycomm::cpu

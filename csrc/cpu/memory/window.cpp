#include "cpu/memory/window.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <numeric>
#include <random>
#include <system_error>

#include "core/layout.h"
#include "cpu/group/fork.h"
#include "cpu/p2p/frame.h"

namespace pycomm::cpu {
namespace {

void write_header(int fd, const Header& header) {
  if (pwrite(fd, &header, sizeof(Header), 0) != static_cast<ssize_t>(sizeof(Header))) {
    throw_errno("pwrite");
  }
}

Header read_header(int fd) {
  Header header{};
  if (pread(fd, &header, sizeof(Header), 0) < 0) throw_errno("pread");
  return header;
}

std::int64_t size_of_file(int fd) {
  struct stat status = {};
  if (fstat(fd, &status) != 0) throw_errno("fstat");
  return status.st_size;
}

// Throws unless the file is the window that this rank expects.
void check_file(int fd, const Header& expected) {
  const Header found = read_header(fd);
  PYCOMM_CHECK(found.magic == kMagic, "the file is not a pycomm window");
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

// Checks a file, and takes ownership of it in any case.
std::shared_ptr<WindowFile> open_file(int fd, const Header& expected) {
  try {
    check_file(fd, expected);
    const std::int64_t begin =
        window_slice_bytes(static_cast<int>(expected.ranks), expected.staging_bytes);
    return std::make_shared<WindowFile>(fd, static_cast<int>(expected.ranks),
                                        Range{begin, expected.slice_bytes - begin});
  } catch (...) {
    close(fd);
    throw;
  }
}

std::vector<int> first_seats(int ranks) {
  std::vector<int> seats(static_cast<std::size_t>(ranks));
  std::iota(seats.begin(), seats.end(), 0);
  return seats;
}

std::vector<int> seats_of(const std::vector<int>& members, const std::vector<int>& seats) {
  std::vector<int> found;
  for (const int member : members) found.push_back(seats.at(static_cast<std::size_t>(member)));
  return found;
}

std::uint64_t random_id() {
  std::random_device random;
  const std::uint64_t high = random(), low = random();
  return (high << 32 | low) | 1;  // not 0
}

}  // namespace

int Window::create(int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes) {
  const int fd = make_window_file(ranks * slice_bytes);
  try {
    reserve_in_file(fd, 0, ranks * window_slice_bytes(ranks, staging_bytes));
    // The size is final, so a rank that has checked it once meets no SIGBUS later.
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      throw_errno("F_ADD_SEALS");
    }
    write_header(fd, {kMagic, kLayout, ranks, slice_bytes, staging_bytes});
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

Window::Window(int fd, int ranks, std::int64_t slice_bytes, std::int64_t staging_bytes)
    : file_(open_file(fd, {kMagic, kLayout, ranks, slice_bytes, staging_bytes})),
      seats_(first_seats(ranks)),
      ranks_(ranks),
      half_bytes_(staging_bytes / 2),
      stride_(window_slice_bytes(ranks, staging_bytes)),
      id_(file_->id()),
      forks_(current_forks()),
      staged_(slot_bytes_),
      departed_(true) {
  slices_.emplace(fd, 0, ranks * stride_);
}

std::int64_t Window::control_position(const Place& place, int ranks, int r,
                                      std::size_t member) const {
  return file_->position(place.owner, place.offset) +
         r * window_slice_bytes(ranks, 2 * half_bytes_) + static_cast<std::int64_t>(member);
}

Window::Place Window::reserve(int owner, int ranks, const std::vector<int>& departed) const {
  Heap& heap = file_->heap(seat(owner));
  const Place place{seat(owner), heap.reserve(ranks * window_slice_bytes(ranks, 2 * half_bytes_)),
                    random_id()};
  const auto position = [&](std::size_t member, int r) {
    return control_position(place, ranks, r, member);
  };
  try {
    file_->write(position(offsetof(Control, header), 0),
                 Header{kMagic, kLayout, ranks, slice_bytes(), 2 * half_bytes_});
    file_->write(position(offsetof(Control, tenant), 0), place.id);
    file_->write(position(offsetof(Control, departed), 0),
                 static_cast<std::uint32_t>(departed.size()));
    for (const int r : departed) file_->write(position(offsetof(Control, left), r), 1U);
  } catch (...) {
    cancel(place);
    throw;
  }
  return place;
}

void Window::leave_at(const Place& place, int ranks, int r) const {
  file_->write(control_position(place, ranks, r, offsetof(Control, left)), 1U);
}

void Window::cancel(const Place& place) const { file_->heap(place.owner).cancel(place.offset); }

void Window::check(const Place& place) const {
  const Range& heap = file_->heap_range();
  const std::int64_t end = heap.begin + heap.count;
  PYCOMM_CHECK(place.owner >= 0 && place.owner < file_->slices() && place.offset >= heap.begin &&
                   place.offset <= end - ranks_ * stride_ && place.id != 0,
               "the window's place lies outside the heap");
}

Window::Window(const Window& whole, std::vector<int> members, int rank, const Place& place)
    : file_(whole.file_),
      seats_(seats_of(members, whole.seats_)),
      ranks_(static_cast<int>(members.size())),
      half_bytes_(whole.half_bytes_),
      stride_(window_slice_bytes(ranks_, 2 * half_bytes_)),
      position_(file_->position(place.owner, place.offset)),
      id_(static_cast<std::uint32_t>(place.id)),
      tenancy_{position_ + static_cast<std::int64_t>(offsetof(Control, tenant)), place.id},
      rank_(rank),
      forks_(current_forks()),
      staged_(0),
      departed_(false) {
  check(place);
  for (int r = 0; r < ranks_; ++r) {
    reserve_in_file(file_->fd(), position_ + r * stride_, staging_begin(ranks_));
  }
  slices_.emplace(file_->fd(), position_, ranks_ * stride_);
  if (place.owner == seat(rank)) file_->heap(place.owner).keep(place.offset, tenancy_);
}

// Twice as much each time, so that a growing tensor needs few calls.
void Window::reserve_staging(int r, std::int64_t bytes) {
  const std::int64_t wanted = std::max({bytes, 2 * staged_, kPage});
  const std::int64_t more = std::min(wanted, slot_bytes_);
  for (std::uint32_t parity = 0; parity < 2; ++parity) {
    for (int i = 0; i < kStagingSlots; ++i) {
      const std::byte* const slot = staging(r, parity) + i * slot_bytes_;
      reserve_in_file(file_->fd(), position_ + (slot - slices_->data()), more);
    }
  }
  staged_ = more;
}

std::uint32_t Window::add_subject(int r, std::string_view text) {
  std::atomic<std::uint32_t>& last = control(r).subjects;
  const std::uint32_t number = last.load(std::memory_order_relaxed) + 1;
  if (number == 1 && in_heap()) {
    reserve_in_file(file_->fd(), position_ + (r + 1) * stride_ - kSubjectBytes, kSubjectBytes);
  }
  subjects(r)[number % kSubjects].write(number, text);
  last.store(number, std::memory_order_release);
  return number;
}

void Window::populate([[maybe_unused]] int r) {
#if defined(MADV_POPULATE_WRITE)
  // Only an optimisation: older kernels fault the pages in at first use.
  const std::int64_t bytes = in_heap() ? staging_begin(ranks_) : stride_;
  (void)madvise(slice(r), static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE);
#endif
}

std::byte* Window::allocate_for_good(int r, std::int64_t bytes) const {
  Heap& heap = file_->heap(seat(r));
  return in_heap() ? heap.lease(bytes, tenancy_) : heap.allocate(bytes);
}

void Window::depart() {
  if (departed_ || forks_ != current_forks()) return;
  departed_ = true;
  try {
    give_back();
  } catch (const std::system_error&) {  // the memory stays until the file goes
  }
}

// The rings of messages, which lie in their senders' heaps.
void Window::punch_rings() const {
  constexpr std::int64_t kBytes = round_up(p2p::kAllocationBytes, kPage);
  for (int to = 0; to < ranks_; ++to) {
    for (int from = 0; from < ranks_; ++from) {
      const std::int64_t ring = mailbox(to, from).sender.ring;
      if (ring < heap_begin() || ring > slice_bytes() - kBytes) continue;  // none, or no place
      file_->punch(file_->position(seat(from), ring), kBytes);
    }
  }
}

// The page with the tenant's word goes with its owner's place.
void Window::give_back() {
  control(rank_).left.store(1, std::memory_order_release);
  Control& first = control(0);
  if (first.departed.fetch_add(1) + 1 == static_cast<std::uint32_t>(ranks_)) {
    punch_rings();
    file_->punch(position_ + kPage, ranks_ * stride_ - kPage);
    first.tenant.store(0);
  }
  file_->heap(seat(rank_)).sweep();
}

}  // namespace pycomm::cpu

#include "cpu/memory/heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/operation.h"
#include "cpu/group/fork.h"
#include "cpu/group/operation_lock.h"
#include "cpu/memory/window_file.h"

namespace pycomm::cpu {
namespace {

// The least that this process maps of another process's heap.
constexpr std::int64_t kSmallestView = 1 << 20;

constexpr std::int64_t kSharedMapping = 2 << 20;

}  // namespace

Mapping::Mapping(int fd, std::int64_t begin, std::int64_t bytes, Access access) : bytes_(bytes) {
  const int protection = access == Access::read ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const data = mmap(nullptr, static_cast<std::size_t>(bytes), protection,
                          MAP_SHARED | MAP_NORESERVE, fd, begin);
  if (data == MAP_FAILED) {
    const int error = errno;
    const std::string what = std::to_string(bytes) + " bytes of the shared window";
    if (error == ENOMEM) {
      throw OutOfMemory("no room to map " + what +
                        ": the process has used up its address space (ulimit -v) or its mappings "
                        "(vm.max_map_count)");
    }
    throw std::system_error(error, std::generic_category(), "mmap of " + what);
  }
  (void)madvise(data, static_cast<std::size_t>(bytes), MADV_DONTDUMP);
  data_ = static_cast<std::byte*>(data);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

HeapMap::~HeapMap() {
  for (const auto& [offset, allocation] : allocations_) {
    leave_as_is_in_children(allocation.data, allocation.bytes);
  }
}

Range HeapMap::shared_range(std::int64_t offset) const {
  const std::int64_t begin = offset / kSharedMapping * kSharedMapping,
                     heap_end = heap_.begin + heap_.count;
  const std::int64_t first = std::max(begin, heap_.begin);
  return {first, std::min(begin + kSharedMapping, heap_end) - first};
}

HeapMap::Allocation HeapMap::make(const Range& offsets) {
  const Range range = shared_range(offsets.begin);
  const std::int64_t within = offsets.begin - range.begin;
  if (within + offsets.count > range.count) {
    Mapping own(fd_, begin_ + offsets.begin, offsets.count);
    return {own.data(), offsets.count, std::move(own)};
  }
  auto found = shared_.find(range.begin);
  if (found == shared_.end()) {
    Mapping mapping(fd_, begin_ + range.begin, range.count);
    found = shared_.emplace(range.begin, SharedMapping{std::move(mapping)}).first;
  }
  ++found->second.users;
  return {found->second.mapping.data() + within, offsets.count, std::nullopt};
}

std::byte* HeapMap::map(const Range& offsets) {
  const std::lock_guard lock(mutex_);
  Allocation made = make(offsets);
  std::byte* const data = made.data;
  make_private_in_children(data, offsets.count, fd_, begin_ + offsets.begin);
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  allocations_.emplace(offsets.begin, std::move(made));
  places_[address] = offsets.begin;
  const std::uintptr_t end = address + static_cast<std::uintptr_t>(offsets.count);
  lowest_ = std::min(lowest_.load(), address);
  highest_ = std::max(highest_.load(), end);
  return data;
}

bool HeapMap::unmap(std::int64_t offset) {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(offset);
  places_.erase(reinterpret_cast<std::uintptr_t>(found->second.data));
  const bool detached = !found->second.detached.empty();
  leave_as_is_in_children(found->second.data, found->second.bytes);
  if (!found->second.own) {
    // Frees private pages now, because the shared mapping may stay for other allocations.
    if (detached) {
      remap(found->second.data, {offset, found->second.bytes}, MAP_SHARED | MAP_NORESERVE);
    }
    const auto mapping = shared_.find(shared_range(offset).begin);
    if (--mapping->second.users == 0) shared_.erase(mapping);
  }
  allocations_.erase(found);
  return !detached;
}

std::byte* HeapMap::at(std::int64_t offset, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto after = allocations_.upper_bound(offset);
  if (after != allocations_.begin()) {
    const auto& [begin, allocation] = *std::prev(after);
    if (offset + bytes <= begin + allocation.bytes) return allocation.data + (offset - begin);
  }
  const std::int64_t needed = offset + bytes - heap_.begin;
  if (views_.empty() || views_.back().bytes() < needed) add_view(needed);
  // Takes the smallest view that fits, so that a tensor's address never changes.
  const auto view = std::find_if(views_.begin(), views_.end(),
                                 [&](const Mapping& v) { return v.bytes() >= needed; });
  return view->data() + (offset - heap_.begin);
}

// Adds a view that is larger than needed, for future tensors, if the address space allows it.
void HeapMap::add_view(std::int64_t needed) {
  const auto ample = std::bit_ceil(static_cast<std::uint64_t>(std::max(needed, kSmallestView)));
  const std::int64_t begin = begin_ + heap_.begin;
  try {
    views_.emplace_back(fd_, begin, std::min(static_cast<std::int64_t>(ample), heap_.count));
  } catch (const OutOfMemory&) {
    views_.emplace_back(fd_, begin, needed);
  }
}

std::int64_t HeapMap::place_of(const void* data, std::int64_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (address < lowest_.load(std::memory_order_relaxed) ||
      address >= highest_.load(std::memory_order_relaxed)) {
    return kNotInWindow;
  }
  const std::lock_guard lock(mutex_);
  const auto after = places_.upper_bound(address);
  if (after == places_.begin()) return kNotInWindow;
  const auto& [begin, offset] = *std::prev(after);
  const auto within = static_cast<std::int64_t>(address - begin);
  const Allocation& allocation = allocations_.at(offset);
  const bool inside = within + bytes <= allocation.bytes && allocation.detached.empty();
  return inside ? offset + within : kNotInWindow;
}

void HeapMap::remap(std::byte* data, const Range& offsets, int flags) {
  if (mmap(data, static_cast<std::size_t>(offsets.count), PROT_READ | PROT_WRITE, flags | MAP_FIXED,
           fd_, begin_ + offsets.begin) == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mmap of a tensor's pages");
  }
}

// Each page only once: the file no longer has the content of a page that is private.
void HeapMap::detach(const Range& pages) {
  const std::lock_guard lock(mutex_);
  ++detachments_;
  auto& [begin, allocation] = *std::prev(allocations_.upper_bound(pages.begin));
  std::vector<bool>& detached = allocation.detached;
  detached.resize(static_cast<std::size_t>(allocation.bytes / kPage));
  const auto first_page = detached.begin() + (pages.begin - begin) / kPage;
  const auto end = first_page + pages.count / kPage;
  for (auto first = std::find(first_page, end, false); first != end;) {
    const auto last = std::find(first, end, true);
    make_private(allocation.data, begin,
                 {(first - detached.begin()) * kPage, (last - first) * kPage});
    std::fill(first, last, true);
    first = std::find(last, end, false);
  }
}

// `within`: pages of the allocation at `begin`.
void HeapMap::make_private(std::byte* allocation, std::int64_t begin, const Range& within) {
  std::byte* const data = allocation + within.begin;
  leave_as_is_in_children(data, within.count, [&] {
    remap(data, {begin + within.begin, within.count}, MAP_PRIVATE);
    // A private page remains the file's until it is written to. Other threads of this process may
    // be writing to it. An atomic write of the present value loses none of their data.
    for (std::int64_t page = 0; page < within.count; page += kPage) {
      reinterpret_cast<volatile std::atomic<std::uint32_t>*>(data + page)->fetch_or(0);
    }
  });
}

Heap::Heap(WindowFile& file, int slice)
    : file_(file), slice_(slice), forks_(current_forks()), free_(file.heap_range(), kPage) {}

// A forked child has a copy of the free ranges, and would take what its parent takes next.
std::unique_lock<std::mutex> Heap::lock_own() {
  if (forks_ != current_forks()) {
    throw GroupUnusable("the window's memory belongs to the parent of this forked process");
  }
  return std::unique_lock(mutex_);
}

std::byte* Heap::allocate(std::int64_t bytes) {
  const auto lock = lock_own();
  return take_and_map(bytes);
}

std::byte* Heap::take_and_map(std::int64_t bytes) {
  const Range range = take(bytes);
  try {
    std::byte* const data = file_.allocate(slice_, range);
    used_[data] = range;
    return data;
  } catch (...) {
    free_.give(range);
    throw;
  }
}

void Heap::free(std::byte* data) {
  if (forks_ != current_forks()) return;  // the memory is the parent's
  const std::lock_guard lock(mutex_);
  unmap_and_give(data);
}

void Heap::unmap_and_give(std::byte* data) {
  const auto used = used_.find(data);
  PYCOMM_CHECK(used != used_.end(), "the address is not an allocation of this heap");
  if (file_.release(slice_, used->second)) free_.give(used->second);
  used_.erase(used);
}

std::int64_t Heap::reserve(std::int64_t bytes) {
  sweep();
  const auto lock = lock_own();
  const Range range = take(bytes);
  places_[range.begin] = range.count;
  return range.begin;
}

void Heap::cancel(std::int64_t offset) {
  if (forks_ != current_forks()) return;
  const std::lock_guard lock(mutex_);
  end({{}, offset, nullptr});
}

void Heap::keep(std::int64_t offset, const Tenancy& tenancy) {
  const auto lock = lock_own();
  leases_.push_back({tenancy, offset, nullptr});
}

std::byte* Heap::lease(std::int64_t bytes, const Tenancy& tenancy) {
  const auto lock = lock_own();
  std::byte* const data = take_and_map(bytes);
  leases_.push_back({tenancy, used_.at(data).begin, data});
  return data;
}

void Heap::sweep() {
  if (forks_ != current_forks()) return;
  const std::lock_guard lock(mutex_);
  const auto over = std::partition(leases_.begin(), leases_.end(), [this](const Lease& lease) {
    return file_.lasts(lease.tenancy);
  });
  std::for_each(over, leases_.end(), [this](const Lease& lease) { end(lease); });
  leases_.erase(over, leases_.end());
}

void Heap::end(const Lease& lease) {
  if (lease.data != nullptr) return unmap_and_give(lease.data);
  const auto place = places_.find(lease.offset);
  file_.punch(file_.position(slice_, place->first), place->second);
  free_.give({place->first, place->second});
  places_.erase(place);
}

Range Heap::take(std::int64_t bytes) {
  if (const auto range = free_.take(bytes)) return *range;
  throw OutOfMemory("the window's heap has no room for " + std::to_string(bytes) +
                    " bytes: " + std::to_string(free_.total()) +
                    " are free, the largest block has " + std::to_string(free_.largest()));
}

}  // namespace pycomm::cpu

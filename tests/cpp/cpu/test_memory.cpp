// The window's memory: its mappings, what it gives back, and how much is available.
#include "cpu/group/fork.h"
#include "cpu/memory/device_heap.h"
#include "cpu/memory/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "support/world.h"

namespace pycomm::test {
namespace {

constexpr std::int64_t kSlice = 64 << 20, kStaging = 64 << 10;

// A file with the mappings that two processes would have.
struct TwoMappings {
  TwoMappings() {
    const int fd = cpu::Window::create(2, kSlice, kStaging), again = dup(fd);
    ours = std::make_shared<cpu::Window>(fd, 2, kSlice, kStaging);
    theirs = std::make_shared<cpu::Window>(again, 2, kSlice, kStaging);
  }
  std::shared_ptr<cpu::Window> ours, theirs;
};

// Addresses found in a heap stay valid, however much of it is mapped later.
void peers_see_allocations() {
  const TwoMappings window;
  cpu::Heap &heap = *window.ours->heap(1), &neighbour = *window.ours->heap(0);
  std::vector<std::byte*> seen;
  for (std::int64_t bytes : {1, 5000, 900'000, 3'000'000, 40'000'000}) {
    std::byte* const data = heap.allocate(bytes);
    neighbour.allocate(bytes)[bytes - 1] = std::byte{9};
    data[0] = data[bytes - 1] = std::byte{7};
    const std::int64_t place = window.ours->place_in_heap(1, data, bytes);
    seen.push_back(window.theirs->in_heap(1, place, bytes));
    PYCOMM_CHECK(seen.back()[0] == std::byte{7} && seen.back()[bytes - 1] == std::byte{7},
                 "what was written");
    PYCOMM_CHECK(window.theirs->in_heap(1, place, bytes) == seen.back(), "the same place");
    PYCOMM_CHECK(window.theirs->place_in_heap(1, seen.back(), 1) == kNotInWindow,
                 "a tensor of another process's is not this one's");
  }
  for (const std::byte* data : seen) PYCOMM_CHECK(*data == std::byte{7}, "all are still there");
}

// If the address space is short, a view is only as large as needed.
void views_fit_into_what_is_left() {
  const TwoMappings window;
  constexpr std::int64_t kBytes = 40 << 20;
  const std::byte* const data = window.ours->heap(1)->allocate(kBytes);
  const std::int64_t place = window.ours->place_in_heap(1, data, kBytes);
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  const rlimit tight{static_cast<rlim_t>(pages * cpu::kPage + kBytes + (8 << 20)), before.rlim_max};
  setrlimit(RLIMIT_AS, &tight);
  const std::byte* seen = nullptr;
  try {
    seen = window.theirs->in_heap(1, place, kBytes);
  } catch (const cpu::OutOfMemory&) {
  }
  setrlimit(RLIMIT_AS, &before);
  PYCOMM_CHECK(seen != nullptr, "there is room for what is needed");
}

void tensors_are_found() {
  const TwoMappings window;
  cpu::Heap& heap = *window.ours->heap(0);
  std::byte* const first = heap.allocate(10'000);
  std::byte* const second = heap.allocate(1);
  std::byte outside;
  const auto place = [&](const void* data, std::int64_t bytes) {
    return window.ours->place_in_heap(0, data, bytes);
  };
  const std::int64_t begin = window.ours->heap_begin();
  PYCOMM_CHECK(place(first, 10'000) == begin && place(first + 100, 5) == begin + 100, "inside");
  PYCOMM_CHECK(place(second, 1) == begin + 3 * cpu::kPage, "the next pages");
  PYCOMM_CHECK(place(first, 3 * cpu::kPage + 1) == kNotInWindow, "longer than its allocation");
  PYCOMM_CHECK(place(&outside, 1) == kNotInWindow && place(nullptr, 0) == kNotInWindow,
               "shared_wait");
  heap.free(first);
  PYCOMM_CHECK(place(second, 1) == begin + 3 * cpu::kPage, "the other one stays");
  PYCOMM_CHECK(place(first, 1) == kNotInWindow, "it is gone");
}

void detached_memory_is_private() {
  const auto [ours, theirs] = TwoMappings();
  cpu::Heap& heap = *ours->heap(1);
  std::byte* const data = heap.allocate(3 * cpu::kPage);
  const std::int64_t begin = ours->place_in_heap(1, data, 3 * cpu::kPage);
  std::byte* const seen = theirs->in_heap(1, begin, 3 * cpu::kPage);
  for (std::int64_t i = 0; i < 3 * cpu::kPage; ++i) data[i] = std::byte{1};
  ours->detach(1, {begin, 2 * cpu::kPage});
  PYCOMM_CHECK(data[0] == std::byte{1} && data[2 * cpu::kPage - 1] == std::byte{1},
               "what was there");
  for (std::int64_t i = 0; i < 3 * cpu::kPage; ++i) seen[i] = std::byte{2};
  PYCOMM_CHECK(data[0] == std::byte{1} && data[2 * cpu::kPage - 1] == std::byte{1}, "out of reach");
  PYCOMM_CHECK(data[2 * cpu::kPage] == std::byte{2}, "the other page is still shared");
  ours->detach(1, {begin, 3 * cpu::kPage});
  PYCOMM_CHECK(data[0] == std::byte{1} && data[2 * cpu::kPage] == std::byte{2}, "what was there");
  PYCOMM_CHECK(ours->place_in_heap(1, data, 1) == kNotInWindow, "others cannot reach it");
  // A stuck rank may still write there, so the place is not used again.
  heap.free(data);
  std::byte* const next = heap.allocate(3 * cpu::kPage);
  const std::int64_t place = ours->place_in_heap(1, next, 3 * cpu::kPage);
  PYCOMM_CHECK(place >= begin + 3 * cpu::kPage, "another place");
  next[0] = std::byte{3};
  PYCOMM_CHECK(*theirs->in_heap(1, place, 1) == std::byte{3}, "which is shared");
}

void heap_gives_back() {
  World world(1);
  cpu::Heap& heap = *world[0].heap();
  for (int i = 0; i < 200; ++i) {
    std::byte* a = heap.allocate(1 << 20);
    std::byte* b = heap.allocate(2 << 20);
    *a = *b = std::byte{1};
    PYCOMM_CHECK(a != b, "allocations must not share memory");
    heap.free(i % 2 == 0 ? a : b);
    heap.free(i % 2 == 0 ? b : a);
  }
  std::byte* whole = heap.allocate((1 << 30) - (1 << 20));
  heap.free(whole);
  try {
    heap.allocate(std::int64_t{1} << 40);
  } catch (const cpu::OutOfMemory&) {
    return;
  }
  throw std::runtime_error("an allocation beyond the heap must fail");
}

// Released memory is free after a wait for the device that began after the release, and if no
// operation has failed.
void device_heap_waits() {
  constexpr std::int64_t kUnit = cpu::DeviceHeap::kUnit;
  int waits = 0;
  std::function<bool()> device = [] { return true; };
  cpu::DeviceHeap heap(cpu::kPage, 2 * kUnit, [&] {
    ++waits;
    return device();
  });
  const std::uintptr_t a = heap.take(1, true), b = heap.take(1, true);
  PYCOMM_CHECK(heap.take(1, true) == 0 && waits == 0, "nothing has been released");
  heap.release(a);
  PYCOMM_CHECK(heap.take(1, false) == 0 && waits == 0, "the device may use it");
  device = [&] {
    heap.release(b);  // another thread, after more work for the device
    return true;
  };
  PYCOMM_CHECK(heap.take(1, true) == a && waits == 1, "the device has been waited for");
  PYCOMM_CHECK(heap.take(1, false) == 0, "the wait was too early for this one");
  device = [] { return false; };
  PYCOMM_CHECK(heap.take(1, true) == 0 && waits == 2, "other ranks may use it");
  device = []() -> bool { throw std::runtime_error("the device has failed"); };
  try {
    heap.take(1, true);
    throw std::logic_error("the device's error must be thrown");
  } catch (const std::runtime_error&) {
  }
  device = [] { return true; };
  PYCOMM_CHECK(heap.take(1, true) == b && waits == 4, "none of it is lost");
  heap.release(b);
  heap.close();
  PYCOMM_CHECK(heap.take(1, true) == 0 && waits == 4, "it is closed");
  PYCOMM_CHECK(!heap.over(), "a block is in use");
  heap.release(a);
  PYCOMM_CHECK(heap.over(), "no block is in use");
}

// No two threads have the same memory.
void threads_share_a_device_heap() {
  constexpr int kUnits = 6;
  cpu::DeviceHeap heap(cpu::kPage, kUnits * cpu::DeviceHeap::kUnit, [] { return true; });
  std::array<std::atomic<int>, kUnits> users = {};
  std::atomic<bool> apart = true;
  const auto use = [&] {
    for (int i = 0; i < 2000; ++i) {
      const std::uintptr_t block = heap.take(2 * cpu::DeviceHeap::kUnit, true);
      if (block == 0) continue;
      auto* const first = &users[(block - cpu::kPage) / cpu::DeviceHeap::kUnit];
      if (first[0].fetch_add(1) != 0 || first[1].fetch_add(1) != 0) apart = false;
      --first[0];
      --first[1];
      heap.release(block);
    }
  };
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) threads.emplace_back(use);
  }
  PYCOMM_CHECK(apart, "a block had two users");
}

void write(const std::filesystem::path& file, const std::string& text) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

// The minimum over the node and its control groups, in both versions of their interface.
void memory_is_what_is_left() {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("pycomm-" + std::to_string(getpid()));
  const auto finds = [&](std::int64_t bytes) {
    PYCOMM_CHECK(cpu::available_memory(root) == bytes,
                 "expected " + std::to_string(bytes) + ", found " +
                     std::to_string(cpu::available_memory(root)));
  };
  constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
  finds(kUnlimited);
  write(root / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\nBuffers: 1 kB\n");
  finds(5000 * 1024);

  write(root / "proc/self/cgroup", "0::/a.slice/b\n");
  finds(5000 * 1024);
  const fs::path two = root / "sys/fs/cgroup";
  write(two / "a.slice/b/memory.max", "max\n");
  write(two / "a.slice/b/memory.current", "100\n");
  finds(5000 * 1024);
  write(two / "a.slice/memory.max", "4000\n");
  write(two / "a.slice/memory.current", "1000\n");
  finds(3000);
  write(two / "a.slice/memory.stat", "anon 300\ninactive_file 250\nfile 900\n");
  finds(3250);
  // A file that was read twice, and the kernel's own caches, are freed on demand as well.
  write(two / "a.slice/memory.stat",
        "anon 300\nshmem 90\nactive_file 400\ninactive_file 250\nslab_reclaimable 50\nslab 70\n");
  finds(3700);
  write(two / "a.slice/b/memory.max", "90\n");
  finds(0);

  write(root / "proc/self/cgroup", "5:cpu:/c\n4:devices,memory:/not/seen/here\n0::/\n");
  const fs::path one = root / "sys/fs/cgroup/memory";
  write(one / "memory.limit_in_bytes", "7000\n");
  write(one / "memory.usage_in_bytes", "6000\n");
  write(one / "memory.stat", "inactive_file 5\ntotal_inactive_file 10\n");
  finds(1010);
  write(one / "memory.stat", "total_active_file 300\ntotal_inactive_file 10\n");
  finds(1310);
  fs::remove_all(root);
}

// A copy for forked children leaves room for the portions that other ranks may be copying.
void copies_leave_room() {
  constexpr std::int64_t kLarge = 1 << 30, kOthers = 15 * cpu::kCopiedPortion;
  PYCOMM_CHECK(cpu::suffices_for_copy(kLarge, kLarge + kOthers), "there is room");
  PYCOMM_CHECK(!cpu::suffices_for_copy(kLarge, kLarge + kOthers - 1), "others lack room");
  PYCOMM_CHECK(cpu::suffices_for_copy(1, 16), "a small copy needs little room");
  PYCOMM_CHECK(!cpu::suffices_for_copy(1, 15), "others lack room for a small copy");
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({{"peers see allocations", peers_see_allocations},
                  {"views fit into what is left", views_fit_into_what_is_left},
                  {"tensors are found", tensors_are_found},
                  {"detached memory is private", detached_memory_is_private},
                  {"heap gives back", heap_gives_back},
                  {"a device's heap waits", device_heap_waits},
                  {"threads share a device's heap", threads_share_a_device_heap},
                  {"memory is what is left", memory_is_what_is_left},
                  {"copies leave room", copies_leave_room}});
}

// Windows for some of the ranks of another window: they need no meeting, work beside it, and give
// their memory back.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "support/messages.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

using cpu::Window;

constexpr std::int64_t kSlice = 64 << 20, kStaging = 256 << 10;

// A window of four ranks. `fd` is a second descriptor of its file.
struct Whole {
  static constexpr int kRanks = 4;
  int fd = -1;
  std::shared_ptr<Window> window;

  Whole() {
    const int file = Window::create(kRanks, kSlice, kStaging);
    fd = dup(file);
    window = std::make_shared<Window>(file, kRanks, kSlice, kStaging);
  }
  ~Whole() { close(fd); }

  // Bytes of memory that the file takes.
  std::int64_t memory() const {
    struct stat status = {};
    fstat(fd, &status);
    return status.st_blocks * 512;
  }
  std::shared_ptr<Window> part(const std::vector<int>& members, int rank,
                               const Window::Place& place) const {
    return std::make_shared<Window>(*window, members, rank, place);
  }
};

// One rank's group on a part of a window.
struct Part {
  Part(const Whole& whole, const std::vector<int>& members, int rank, const Window::Place& place)
      : group(whole.part(members, rank, place), threads(static_cast<int>(members.size())), rank,
              static_cast<int>(members.size()), 2, std::chrono::seconds(60), 0) {}
  cpu::Group group;
};

// The sum over `size` ranks of `rank + i % 7`, computed by the group.
void check_sum(cpu::Group& group, std::int64_t count) {
  std::vector<float> data(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(group.rank() + i % 7);
  group.run(all_reduce_of(count), data.data(), data.data());
  const int size = group.size(), ranks = size * (size - 1) / 2;
  for (std::int64_t i = 0; i < count; ++i) {
    must(data[i] == static_cast<float>(ranks + size * (i % 7)), "a wrong sum");
  }
}

void run_in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> all;
  std::atomic<bool> failed = false;
  for (int r = 0; r < count; ++r) {
    all.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& error) {
        std::printf("rank %d: %s\n", r, error.what());
        failed = true;
      }
    });
  }
  for (std::thread& thread : all) thread.join();
  must(!failed, "a rank has failed");
}

// All four ranks use three groups at once: all of them, and two pairs.
void groups_work_beside_each_other() {
  const Whole whole;
  const std::vector<std::vector<int>> groups = {{0, 1, 2, 3}, {2, 0}, {3, 1}};
  std::vector<Window::Place> places;
  for (const auto& members : groups) {
    places.push_back(whole.window->reserve(members[0], static_cast<int>(members.size()), {}));
  }
  run_in_threads(Whole::kRanks, [&](int r) {
    cpu::Group base(whole.window, threads(4), r, 4, 2, std::chrono::seconds(60), 0);
    Part all(whole, groups[0], r, places[0]);
    const std::size_t number = r % 2 == 0 ? 1 : 2;
    const int index = groups[number][0] == r ? 0 : 1;
    Part pair(whole, groups[number], index, places[number]);
    for (int i = 0; i < 5; ++i) {
      for (const std::int64_t count : {1, 16, 1000, 100'000}) {
        check_sum(all.group, count);
        check_sum(pair.group, count + 1);
        check_sum(base, count + 2);
      }
      const Bytes mine = content(index, i, 40'000), theirs = content(1 - index, i, 40'000);
      const RequestPtr request = isend(pair.group, mine, 1 - index);
      must(recv(pair.group, 40'000, 1 - index) == theirs, "a wrong message");
      request->wait();
    }
  });
}

// A rank that comes when others have begun finds what they have left for it.
void a_rank_may_come_late() {
  const Whole whole;
  const std::vector<int> members = {1, 3};
  const Window::Place place = whole.window->reserve(1, 2, {});
  run_in_threads(2, [&](int r) {
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    Part part(whole, members, r, place);
    if (r == 0) {
      send(part.group, content(0, 1, 5000), 1);
    } else {
      must(recv(part.group, 5000, 0) == content(0, 1, 5000), "sent before this rank came");
    }
    check_sum(part.group, 3000);
  });
}

void an_abort_reaches_a_rank_that_comes_later() {
  const Whole whole;
  const Window::Place place = whole.window->reserve(0, 2, {});
  Part first(whole, {0, 1}, 0, place);
  first.group.abort();
  Part second(whole, {0, 1}, 1, place);
  const CollectiveError error = error_of([&] { check_sum(second.group, 10); });
  must(error.reason == Reason::aborted && error.rank == 0, error.what());
}

// Another group of rank 0 has failed and takes the tensor from rank 1 while this one runs. What rank 1
// writes is then lost, so the operation must not succeed.
void an_operation_on_a_detached_tensor_fails() {
  constexpr std::int64_t kCount = 100'000, kBytes = kCount * 4;
  const Whole whole;
  const Window::Place place = whole.window->reserve(0, 2, {});
  Part first(whole, {0, 1}, 0, place), second(whole, {0, 1}, 1, place);
  Operation operation = all_reduce_of(kCount);
  operation.algorithm = Algorithm::two_shot;  // which uses tensors in the window directly
  std::byte* const x = whole.window->heap(0)->allocate(kBytes);
  std::byte* const y = whole.window->heap(1)->allocate(kBytes);
  run_in_threads(2, [&](int r) {
    if (r == 0) {
      const CollectiveError error = error_of([&] { first.group.run(operation, x, x); });
      must(error.reason == Reason::aborted && error.rank == 0, error.what());
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::int64_t begin = whole.window->place_in_heap(0, x, kBytes);
    whole.window->detach(0, {begin, round_up(kBytes, cpu::kPage)});
    try {
      second.group.run(operation, y, y);
    } catch (const CollectiveError&) {  // depends on which rank ends first
    }
  });
}

void memory_comes_back() {
  const Whole whole;
  const std::int64_t before = whole.memory();
  std::int64_t first_place = 0;
  for (int i = 0; i < 20; ++i) {
    const std::vector<int> members = {3, 2, 0, 1};
    const Window::Place place = whole.window->reserve(i % 4, 4, {});
    if (i == 0) first_place = place.offset;
    if (i % 4 == 0) must(place.offset == first_place, "the place is used again");
    must(whole.memory() <= before + cpu::kPage, "a place costs no memory");
    run_in_threads(4, [&](int r) {
      Part part(whole, members, r, place);
      check_sum(part.group, 1000);
      const int to = (r + 1) % 4, from = (r + 3) % 4;
      const Bytes mine = content(r, i, 100'000);
      const RequestPtr request = isend(part.group, mine, to);
      must(recv(part.group, 100'000, from) == content(from, i, 100'000), "a wrong message");
      request->wait();
    });
    must(whole.memory() <= before + cpu::kPage, "the last rank gives all memory back but a page");
    for (int r = 0; r < 4; ++r) whole.window->heap(r)->sweep();
    must(whole.memory() == before, "and the place's owner that page");
  }
}

// A collective touches no more of the staging than it has reserved.
void staging_is_reserved() {
  constexpr std::int64_t kCount = 10, kWhole = kStaging / cpu::kPage, kSome = 2 * kStagingSlots;
  static_assert(kWhole > kSome);
  const std::vector<std::pair<Collective, std::int64_t>> pages = {
      {Collective::all_reduce, kSome},      {Collective::reduce, kSome},
      {Collective::broadcast, kSome},       {Collective::all_gather, kSome},
      {Collective::gather, kSome},          {Collective::barrier, 0},
      {Collective::reduce_scatter, kWhole}, {Collective::all_to_all, kWhole},
      {Collective::scatter, kWhole}};
  for (const auto& [collective, expected] : pages) {
    const Whole whole;
    const std::vector<int> members = {0, 1, 2, 3};
    const Window::Place place = whole.window->reserve(0, 4, {});
    std::vector<std::unique_ptr<Part>> parts;
    for (int r = 0; r < 4; ++r) {
      parts.push_back(std::make_unique<Part>(whole, members, r, place));
    }
    const std::int64_t before = whole.memory();
    run_in_threads(4, [&, collective = collective](int r) {
      Operation operation = all_reduce_of(collective == Collective::barrier ? 0 : kCount);
      operation.collective = collective;
      std::vector<float> input(4 * kCount, 1), output(4 * kCount);
      for (int i = 0; i < 12; ++i) parts[r]->group.run(operation, input.data(), output.data());
    });
    must(whole.memory() - before == 4 * expected * cpu::kPage,
         std::string(name_of(collective)) + " takes " + std::to_string(whole.memory() - before));
  }
}

void memory_stays_while_a_rank_uses_it() {
  const Whole whole;
  const std::int64_t before = whole.memory();
  const Window::Place place = whole.window->reserve(0, 2, {});
  auto second = std::make_unique<Part>(whole, std::vector{0, 1}, 1, place);
  std::vector<float> data(500, 1);
  std::thread sum([&] { second->group.run(all_reduce_of(500), data.data(), data.data()); });
  {
    Part first(whole, {0, 1}, 0, place);
    std::vector<float> mine(500, 2);
    first.group.run(all_reduce_of(500), mine.data(), mine.data());
  }
  sum.join();
  whole.window->heap(0)->sweep();
  must(whole.window->reserve(0, 2, {}).offset != place.offset, "rank 1 still uses the first place");
  must(second->group.comm().completed() == 1, "the window's content is still there");
  second.reset();
  whole.window->heap(0)->sweep();
  must(whole.window->reserve(0, 2, {}).offset == place.offset, "nobody uses it any more");
  must(whole.memory() <= before + 2 * cpu::kPage, "only the two words that reserve() writes");
}

void ranks_that_never_come_count() {
  const Whole whole;
  const std::int64_t before = whole.memory();
  const Window::Place place = whole.window->reserve(0, 3, {1});
  {
    const auto first = whole.part({0, 1, 2}, 0, place);
  }
  whole.window->heap(0)->sweep();
  must(whole.memory() > before, "rank 1 has not left");
  {
    const auto second = whole.part({0, 1, 2}, 1, place);
  }
  whole.window->heap(0)->sweep();
  must(whole.memory() == before, "rank 2 will never come");
}

void a_place_can_be_cancelled() {
  const Whole whole;
  const std::int64_t before = whole.memory();
  const Window::Place place = whole.window->reserve(2, 4, {});
  whole.window->cancel(place);
  must(whole.memory() == before, "it takes no memory");
  must(whole.window->reserve(2, 4, {}).offset == place.offset, "it can be used again");
}

void impossible_places_are_refused() {
  const Whole whole;
  for (const Window::Place& place :
       {Window::Place{4, 1 << 20, 1}, Window::Place{-1, 1 << 20, 1}, Window::Place{0, 0, 1},
        Window::Place{0, kSlice - 4096, 1}, Window::Place{0, 1 << 20, 0}}) {
    must(refused([&] { whole.part({0, 1}, 0, place); }), "a place outside the heap");
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all(
      {{"groups work beside each other", groups_work_beside_each_other},
       {"a rank may come late", a_rank_may_come_late},
       {"an abort reaches a rank that comes later", an_abort_reaches_a_rank_that_comes_later},
       {"an operation on a detached tensor fails", an_operation_on_a_detached_tensor_fails},
       {"memory comes back", memory_comes_back},
       {"staging is reserved", staging_is_reserved},
       {"memory stays while a rank uses it", memory_stays_while_a_rank_uses_it},
       {"ranks that never come count", ranks_that_never_come_count},
       {"a place can be cancelled", a_place_can_be_cancelled},
       {"impossible places are refused", impossible_places_are_refused}});
}

// Groups that shrink: the survivors go on without the ranks that are gone, again and again, and get
// their memory back. The orders of events are explored by checker/test_agreement.cpp.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "support/messages.h"
#include "support/world.h"

namespace pycomm::test {
namespace {

using cpu::Window;
using Milliseconds = std::chrono::milliseconds;

constexpr std::int64_t kSlice = 64 << 20, kStaging = 256 << 10;

std::unique_ptr<cpu::Group> group_on(std::shared_ptr<Window> window, int rank, int size) {
  return std::make_unique<cpu::Group>(std::move(window), threads(size), rank, size, 2,
                                      std::chrono::seconds(60), 0);
}

// One rank: its group, and its number in the first group.
struct Rank {
  std::unique_ptr<cpu::Group> group;
  int number;

  // Goes on in a smaller group; returns the numbers of its members in the larger one.
  std::vector<int> shrink(Milliseconds patience = std::chrono::seconds(60)) {
    const cpu::Survivors survivors = group->shrink(patience);
    const auto& members = survivors.members;
    const auto found = std::find(members.begin(), members.end(), group->rank());
    must(found != members.end(), "a survivor is a member");
    group->close();
    group = group_on(survivors.window, static_cast<int>(found - members.begin()),
                     static_cast<int>(members.size()));
    return members;
  }
};

struct Ranks {
  int fd;
  std::shared_ptr<Window> window;
  std::vector<Rank> all;

  explicit Ranks(int size) {
    const int file = Window::create(size, kSlice, kStaging);
    fd = dup(file);
    window = std::make_shared<Window>(file, size, kSlice, kStaging);
    for (int r = 0; r < size; ++r) all.push_back({group_on(window, r, size), r});
  }
  ~Ranks() { close(fd); }

  // Bytes of memory that the file takes.
  std::int64_t memory() const {
    struct stat status = {};
    fstat(fd, &status);
    return status.st_blocks * 512;
  }

  void run(const std::function<void(Rank&)>& body) {
    std::vector<std::thread> started;
    std::atomic<bool> failed = false;
    for (Rank& rank : all) {
      started.emplace_back([&] {
        try {
          body(rank);
        } catch (const std::exception& error) {
          std::printf("rank %d: %s\n", rank.number, error.what());
          failed = true;
          rank.group->leave();
        }
      });
    }
    for (std::thread& thread : started) thread.join();
    must(!failed, "a rank has failed");
  }
};

// The sum over all ranks of `number + i % 7`.
void add(Rank& rank, std::int64_t count) {
  std::vector<float> data(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) data[i] = static_cast<float>(rank.number + i % 7);
  rank.group->run(all_reduce_of(count), data.data(), data.data());
  const float first = data[0];
  for (std::int64_t i = 0; i < count; ++i) {
    must(data[i] == first + static_cast<float>(rank.group->size() * (i % 7)), "a wrong sum");
  }
}

void survivors_go_on() {
  Ranks ranks(4);
  ranks.run([](Rank& rank) {
    if (rank.number == 1) return rank.group->leave();
    const CollectiveError error = error_of([&] { add(rank, 1000); });
    must(error.reason == Reason::peer_died && error.rank == 1, error.what());
    must(rank.shrink() == std::vector<int>{0, 2, 3}, "the members are the survivors");
    for (const std::int64_t count : {1, 16, 1000, 200'000}) add(rank, count);
    const int to = (rank.group->rank() + 1) % 3, from = (rank.group->rank() + 2) % 3;
    const Bytes mine = content(to, 1, 50'000);
    const RequestPtr request = isend(*rank.group, mine, to);
    must(recv(*rank.group, 50'000, from) == content(rank.group->rank(), 1, 50'000), "a message");
    request->wait();
  });
}

// One rank after the other goes, until one is left. A rank may learn of it in the operation that the
// victim has completed, or in the next one.
void down_to_one() {
  constexpr int kRanks = 8;
  Ranks ranks(kRanks);
  ranks.run([](Rank& rank) {
    for (int gone = 0; gone < kRanks - 1; ++gone) {
      const int victim = gone % 2 == 0 ? 0 : rank.group->size() - 1;
      const CollectiveError error = error_of([&] {
        for (int i = 0; i < 3 && rank.group->rank() == victim; ++i) add(rank, 100'000);
        while (rank.group->rank() != victim) add(rank, 100'000);
        throw failure(Reason::returned, victim, 0, {}, 0);
      });
      must(error.rank == victim, error.what());
      if (rank.group->rank() == victim) return rank.group->close();
      must(static_cast<int>(rank.shrink().size()) == kRanks - 1 - gone, "one rank less");
    }
    add(rank, 10);
  });
}

// Nobody fails: the group is aborted by the ranks that shrink it, and loses nobody.
void without_a_failure() {
  Ranks ranks(3);
  const std::int64_t before = ranks.memory();
  for (int i = 0; i < 50; ++i) {
    ranks.run([](Rank& rank) {
      must(rank.shrink().size() == 3, "nobody is gone");
      add(rank, 1000);
    });
  }
  // Every window but the last has gone.
  must(ranks.memory() <= before + (1 << 20), "windows give their memory back");
  ranks.run([](Rank& rank) { rank.group->close(); });
  for (int r = 0; r < 3; ++r) ranks.window->heap(r)->sweep();
  must(ranks.memory() == before, "all of it");
}

void a_rank_that_comes_too_late_is_left_out() {
  Ranks ranks(3);
  std::atomic<int> over = 0;
  ranks.run([&](Rank& rank) {
    if (rank.number == 2) {
      while (over < 2) std::this_thread::sleep_for(Milliseconds(1));
      try {
        rank.shrink();
        must(false, "it was left out");
      } catch (const cpu::GroupUnusable& error) {
        must(std::strstr(error.what(), "too late") != nullptr, error.what());
      }
      return;
    }
    must(rank.shrink(Milliseconds(200)) == std::vector<int>{0, 1}, "those in time");
    ++over;
    add(rank, 1000);
  });
}

// The smaller group has ended, and its memory is a tensor now.
void a_rank_that_comes_even_later_touches_nothing() {
  Ranks ranks(2);
  Rank &early = ranks.all[0], &late = ranks.all[1];
  must(early.shrink(Milliseconds(50)) == std::vector<int>{0}, "those in time");
  must(early.shrink() == std::vector<int>{0}, "again");
  constexpr std::int64_t kBytes = 4 << 20;
  std::byte* const tensor = early.group->heap()->allocate(kBytes);
  std::memset(tensor, 0, kBytes);
  try {
    late.shrink();
    must(false, "it was left out");
  } catch (const cpu::GroupUnusable& error) {
    must(std::strstr(error.what(), "too late") != nullptr, error.what());
  }
  must(std::all_of(tensor, tensor + kBytes, [](std::byte b) { return b == std::byte{}; }),
       "the tensor is untouched");
}

void an_abort_ends_it() {
  Ranks ranks(2);
  std::thread other([&] {
    std::this_thread::sleep_for(Milliseconds(100));
    ranks.all[0].group->abort();
  });
  try {
    ranks.all[0].shrink();
    must(false, "it was aborted");
  } catch (const cpu::GroupUnusable& error) {
    must(std::strstr(error.what(), "aborted") != nullptr, error.what());
  }
  other.join();
  must(ranks.all[1].shrink() == std::vector<int>{1}, "the other one is alone");
}

// Another thread closes the group, which has a message to come.
void a_group_is_closed_while_it_shrinks() {
  for (int i = 0; i < 20; ++i) {
    Ranks ranks(2);
    cpu::Group& group = *ranks.all[0].group;
    Bytes data(100'000);
    const RequestPtr request = irecv(group, data, 1);
    std::thread other([&] {
      while (group.abort_word() == 0) std::this_thread::yield();  // shrink() has begun
      group.close();
    });
    try {
      group.shrink(std::chrono::minutes(10));
    } catch (const cpu::GroupUnusable&) {
    }
    other.join();
    must(error_of([&] { request->wait(); }).reason == Reason::aborted, "it was aborted");
  }
}

// The rank that has let others wait until the timeout is not awaited again.
void a_rank_that_did_not_answer_is_not_awaited() {
  Ranks ranks(3);
  ranks.all[0].group->abort(timeout_word(1, 0, 1));
  ranks.run([](Rank& rank) {
    if (rank.number == 1) return;
    must(rank.shrink() == std::vector<int>{0, 2}, "those that answer");
    add(rank, 10);
  });
}

void interrupt() { throw std::runtime_error("interrupted"); }

void a_rank_that_is_interrupted_is_gone() {
  Ranks ranks(2);
  ranks.run([](Rank& rank) {
    if (rank.number == 1) {
      try {
        rank.group->shrink(std::chrono::seconds(60), interrupt);
        must(false, "it was interrupted");
      } catch (const std::runtime_error&) {
      }
      return;
    }
    std::this_thread::sleep_for(Milliseconds(200));
    must(rank.shrink() == std::vector<int>{0}, "it is alone");
    add(rank, 10);
  });
}

// Work that is under way, or waits to be done, fails before the group shrinks.
void submitted_work_fails_first() {
  Ranks ranks(2);
  std::atomic<bool> submitted = false;
  ranks.run([&](Rank& rank) {
    std::vector<float> data(1 << 20, 1.0f);
    std::vector<std::shared_ptr<cpu::Work>> works;
    if (rank.number == 0) {
      for (int i = 0; i < 3; ++i) {
        works.push_back(rank.group->submit(all_reduce_of(1 << 20), data.data(), data.data()));
      }
    }
    if (rank.number == 0) submitted = true;
    while (!submitted) std::this_thread::yield();
    must(rank.shrink().size() == 2, "nobody is gone");
    for (const auto& work : works) {
      must(error_of([&] { work->wait(nullptr); }).reason == Reason::aborted, "it was aborted");
    }
    add(rank, 1000);
  });
}

void a_group_shrinks_once() {
  Ranks ranks(1);
  Rank& rank = ranks.all[0];
  const cpu::Survivors survivors = rank.group->shrink(std::chrono::seconds(1));
  must(survivors.members == std::vector<int>{0}, "itself");
  try {
    rank.group->shrink(std::chrono::seconds(1));
    must(false, "it has shrunk");
  } catch (const cpu::GroupUnusable&) {
  }
}

}  // namespace
}  // namespace pycomm::test

int main() {
  using namespace pycomm::test;
  return run_all({
      {"survivors go on", survivors_go_on},
      {"down to one", down_to_one},
      {"without a failure", without_a_failure},
      {"a rank that comes too late is left out", a_rank_that_comes_too_late_is_left_out},
      {"a rank that comes even later touches nothing",
       a_rank_that_comes_even_later_touches_nothing},
      {"an abort ends it", an_abort_ends_it},
      {"a group is closed while it shrinks", a_group_is_closed_while_it_shrinks},
      {"a rank that did not answer is not awaited", a_rank_that_did_not_answer_is_not_awaited},
      {"a rank that is interrupted is gone", a_rank_that_is_interrupted_is_gone},
      {"submitted work fails first", submitted_work_fails_first},
      {"a group shrinks once", a_group_shrinks_once},
  });
}

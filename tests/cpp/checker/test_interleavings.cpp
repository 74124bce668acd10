// How operations end when a rank aborts the group, leaves, or calls something else, and whether ranks
// then decide alike. This depends on
// the order of events, so the CPU's own code (cpu/executor/comm.cpp, cpu/group/group.cpp) runs here in all orders
// of its accesses to the window, up to a number of delays (checker/explorer.h).
#include <linux/futex.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <optional>

#include "checker/atomics.h"
#include "checker/clock.h"
#include "checker/explorer.h"
#include "cpu/group/group.h"
#include "cpu/optim/sharded_step.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using checker::Explorer;
using checker::Violation;

constexpr std::int64_t kCount = 32;
constexpr float kGivenBack = -1e6f;

// The current run's fibers and their waits. Time passes only while all fibers wait.
struct Run {
  checker::Explorer& explorer;
  checker::Fibers fibers;
  // What a fiber has read since it last waited, and how often each place had been written by then.
  using Seen = std::map<const volatile void*, std::int64_t>;
  Seen writes;
  std::vector<Seen> seen, before;          // by fiber; `before`: at its last wait
  std::vector<std::int64_t> milliseconds;  // by fiber
};
Run* run = nullptr;

// A use of a rank's tensor by its caller or by another rank. What ranks read and write in an
// operation that succeeds does not depend on the order.
void touch_tensor(std::size_t owner, bool user) { run->explorer.touch(&run->seen[owner], user); }

// A wait between two polls: returns when one of the places that the fiber polls has been written.
void wait_for_write() {
  if (run == nullptr) return;
  checker::finish_store();
  const std::size_t fiber = run->fibers.current();
  run->milliseconds[fiber] += 2;
  const Run::Seen seen = std::exchange(run->seen[fiber], {});
  if (std::exchange(run->before[fiber], seen) != seen) return;  // later, it polls more places
  const auto has_changed = [](const auto& place) {
    return run->writes[place.first] != place.second;
  };
  run->fibers.wait_until([=] { return std::any_of(seen.begin(), seen.end(), has_changed); },
                         [] { return "polls"; });
}

struct Outcome {
  int succeeded = 0;  // operations
  int decided = 0;    // decisions to go on
  std::optional<CollectiveError> error;
  float* tensor = nullptr;
};

// A sharded optimizer step; it may measure gradients first.
enum class Sharded { no, updates, measures };

struct Scenario {
  int ranks;
  std::vector<Algorithm> operations;
  // Threads that abort the group, by the rank whose group they call.
  std::vector<int> aborts;
  // The rank that leaves before the last operation, and the rank that calls it with another count.
  int leaves = -1;
  int differs = -1;
  std::uint32_t first_epoch = 0;
  Sharded sharded = Sharded::no;  // instead of the last operation
  bool decides = false;           // after each operation, whether to go on
};

float value(int rank, int operation) { return static_cast<float>(rank + 10 * operation + 1); }

// A sharded step has its parameters where other operations have their tensor. Gradients and sums follow.
constexpr std::int64_t kTensorBytes = 4 * kCount * 4;

// A window with a tensor of every rank, which serves many groups one after another.
struct SharedMemory {
  std::shared_ptr<cpu::Window> window;
  std::vector<float*> tensors;

  explicit SharedMemory(int ranks) {
    constexpr std::int64_t kSlice = 1 << 20, kStaging = 8 << 10;
    const int file = cpu::Window::create(ranks, kSlice, kStaging);
    window = std::make_shared<cpu::Window>(file, ranks, kSlice, kStaging);
    for (int r = 0; r < ranks; ++r) {
      tensors.push_back(reinterpret_cast<float*>(window->heap(r)->allocate(kTensorBytes)));
    }
  }
};

// A group whose ranks are fibers.
struct Ranks {
  const std::shared_ptr<cpu::Window> window;
  std::vector<std::unique_ptr<cpu::Group>> groups;

  Ranks(const SharedMemory& memory, int size, std::uint32_t first_epoch) : window(memory.window) {
    const auto count = static_cast<std::size_t>(size);
    const auto peers = std::make_shared<const cpu::Liveness>(
        std::vector<int>(count, 0), std::vector<std::shared_ptr<cpu::Process>>(count));
    for (int r = 0; r < size; ++r) {
      constexpr auto kHeader = static_cast<std::int64_t>(sizeof(cpu::Header));
      auto* const slice = reinterpret_cast<std::byte*>(&window->control(r));
      std::fill_n(slice + kHeader, window->heap_begin() - kHeader, std::byte{});
    }
    for (int r = 0; r < size; ++r) {
      groups.push_back(std::make_unique<cpu::Group>(window, peers, r, size, 0,
                                                    std::chrono::hours(1), first_epoch));
    }
  }
  cpu::Group& operator[](int r) { return *groups[static_cast<std::size_t>(r)]; }
  int size() const { return static_cast<int>(groups.size()); }
  bool inside(int r) const {
    return __atomic_load_n(
        reinterpret_cast<const std::uint32_t*>(&window->control(r).in_peers_heaps),
        __ATOMIC_SEQ_CST);
  }

  // The offset of an address in a rank's control page, or -1 if it is in none.
  std::ptrdiff_t place(const volatile void* address) const {
    for (int r = 0; r < size(); ++r) {
      const std::ptrdiff_t offset = static_cast<const volatile std::byte*>(address) -
                                    reinterpret_cast<const std::byte*>(&window->control(r));
      if (offset >= 0 && offset < static_cast<std::ptrdiff_t>(sizeof(cpu::Control))) return offset;
    }
    return -1;
  }
};

// Another fiber may run before each write to the window, and around each access that decides
// whether a rank may use other ranks' tensors. Excluded are writes about waits and sleep, whose
// timing makes no difference.
bool about_sleep(std::ptrdiff_t place) {
  return place == offsetof(cpu::Control, waiting) || place == offsetof(cpu::Control, asleep) ||
         place == offsetof(cpu::Control, bell);
}
bool matters_before_write(std::ptrdiff_t place) { return place >= 0 && !about_sleep(place); }
bool matters_elsewhere(std::ptrdiff_t place) {
  const auto outcome = place - static_cast<std::ptrdiff_t>(offsetof(cpu::Control, outcomes));
  return place == offsetof(cpu::Control, abort) ||
         place == offsetof(cpu::Control, in_peers_heaps) || (outcome >= 0 && outcome < 16);
}

// Subtracts the average of value(0, k), value(1, k), ... from parameters value(0, k): rank r owns the
// r-th of as many parameters as there are ranks.
void run_sharded(Ranks& ranks, int r, const Scenario& scenario, int k, float* x) {
  const int size = ranks.size();
  const std::int64_t each = kCount / size / 4 * 4;
  float counter = 0, clip = 0;
  std::fill_n(x, kCount, value(0, k));
  std::fill_n(x + kCount, kCount, value(r, k));
  Settings settings;
  settings.rule = Rule::sgd;
  settings.lr = 1;
  cpu::ShardedStep step;
  step.groups = {{settings, static_cast<std::size_t>(size)}};
  step.arena = reinterpret_cast<std::byte*>(x);
  step.arena_bytes = kTensorBytes;
  step.sums = reinterpret_cast<double*>(x + 2 * kCount);
  step.control = {nullptr, nullptr, &clip};
  step.max_norm = 1e9;
  step.measures = scenario.sharded == Sharded::measures;
  step.parallel = [](std::int64_t n, const cpu::Body& body) { body(0, n); };
  if (!step.measures) clip = 1;
  for (int p = 0; p < size; ++p) {
    Segment part{};
    part.param = x + p * each;
    part.grad = x + kCount + p * each;
    part.param_storage = part.grad_storage = Storage::f32;
    part.step = &counter;
    part.count = p == r ? each : 0;
    step.shards.push_back({part, each, 0});
  }
  try {
    ranks[r].run(cpu::sharded_call(step, r == scenario.differs ? "another" : "step"));
  } catch (const CollectiveError&) {
    const bool changed = std::any_of(x, x + kCount, [&](float p) { return p != value(0, k); });
    if (changed && !step.half_done) throw Violation("a rank is not told that parameters are new");
    throw;
  }
  touch_tensor(static_cast<std::size_t>(r), true);
  float sum = 0;
  for (int from = 0; from < size; ++from) sum += value(from, k);
  const float wanted = value(0, k) - sum / static_cast<float>(size);
  for (std::int64_t i = 0; i < each * size; ++i) {
    if (x[i] != wanted) throw Violation("a sharded step has succeeded with a wrong result");
  }
}

void run_all_reduce(Ranks& ranks, int r, const Scenario& scenario, int k, float* x, bool is_last) {
  const Algorithm algorithm = scenario.operations[static_cast<std::size_t>(k)];
  const std::int64_t count = r == scenario.differs && is_last ? kCount / 2 : kCount;
  std::fill_n(x, kCount, value(r, k));
  ranks[r].run({Collective::all_reduce, algorithm, DType::f32, ReduceOp::sum, 0, count}, x, x);
  touch_tensor(static_cast<std::size_t>(r), true);
  float wanted = 0;
  for (int from = 0; from < scenario.ranks; ++from) wanted += value(from, k);
  for (std::int64_t i = 0; i < kCount; ++i) {
    if (x[i] != wanted) throw Violation("an operation has succeeded with a wrong result");
  }
}

void live(Ranks& ranks, int r, const Scenario& scenario, Outcome& outcome) {
  float* const x = outcome.tensor;
  const auto last = static_cast<int>(scenario.operations.size()) - 1;
  for (int k = 0; k <= last; ++k) {
    if (r == scenario.leaves && k == last) return ranks[r].leave();
    touch_tensor(static_cast<std::size_t>(r), true);
    try {
      if (scenario.sharded != Sharded::no && k == last) {
        run_sharded(ranks, r, scenario, k, x);
      } else {
        run_all_reduce(ranks, r, scenario, k, x, k == last);
      }
    } catch (const CollectiveError& error) {
      outcome.error.emplace(error);
      touch_tensor(static_cast<std::size_t>(r), true);
      std::fill_n(x, kCount, kGivenBack);
      return;
    }
    ++outcome.succeeded;
    if (!scenario.decides) continue;
    try {
      if (!ranks[r].should_commit(true)) throw Violation("nobody was against it");
      ++outcome.decided;
    } catch (const CollectiveError&) {
      return;
    }
  }
}

// The number of operations up to the one with this sequence number.
int operations_until(std::uint32_t number, std::uint32_t first_epoch) {
  int count = 0;
  for (std::uint32_t next = first_epoch; next != number; next = next_sequence(next)) ++count;
  return count;
}

void check(const Scenario& scenario, const std::vector<Outcome>& outcomes) {
  const CollectiveError* first = nullptr;
  const auto count = [](const Outcome& outcome) { return outcome.succeeded + outcome.decided; };
  int least = count(outcomes[0]);
  for (const Outcome& outcome : outcomes) least = std::min(least, count(outcome));
  for (const Outcome& outcome : outcomes) {
    if (!outcome.error) continue;
    const CollectiveError& error = *outcome.error;
    if (first == nullptr) first = &error;
    if (error.reason != first->reason || error.rank != first->rank) {
      throw Violation("ranks name different culprits");
    }
    if (scenario.aborts.empty() && error.rank != std::max(scenario.leaves, scenario.differs)) {
      throw Violation("the wrong rank is blamed");
    }
    if (operations_until(error.completed, scenario.first_epoch) > least) {
      throw Violation("an operation counts as complete, but has failed on a rank");
    }
    for (std::int64_t i = 0; i < kCount; ++i) {
      if (outcome.tensor[i] != kGivenBack) throw Violation("a tensor was written after the error");
    }
  }
}

// Ranks that have come to a decision have made it alike.
void check_decisions(const Scenario& scenario, const std::vector<Outcome>& outcomes) {
  int most = 0;
  for (const Outcome& outcome : outcomes) most = std::max(most, outcome.decided);
  for (int r = 0; r < scenario.ranks; ++r) {
    const int decided = outcomes[static_cast<std::size_t>(r)].decided;
    const bool left =
        r == scenario.leaves && decided == static_cast<int>(scenario.operations.size()) - 1;
    if (decided != most && !left) throw Violation("only some ranks have decided to go on");
  }
}

void once(const Scenario& scenario, const SharedMemory& memory, checker::Explorer& explorer,
          bool late_stores) {
  Ranks ranks(memory, scenario.ranks, scenario.first_epoch);
  std::vector<Outcome> outcomes(memory.tensors.size());
  for (std::size_t r = 0; r < outcomes.size(); ++r) outcomes[r].tensor = memory.tensors[r];
  const auto fibers = outcomes.size() + scenario.aborts.size();
  Run mine{explorer,
           checker::Fibers(explorer.choice()),
           {},
           std::vector<Run::Seen>(fibers),
           std::vector<Run::Seen>(fibers),
           std::vector<std::int64_t>(fibers)};
  run = &mine;
  const auto pause_if = [](bool matters) {
    if (matters) run->fibers.pause();
  };
  const auto elsewhere = [&](const volatile void* address) {
    pause_if(matters_elsewhere(ranks.place(address)));
  };
  // A rank that has entered other ranks' heaps may be using any tensor.
  const auto touch = [&](const volatile void* address, bool writes) {
    const std::ptrdiff_t place = ranks.place(address);
    if (!about_sleep(place)) explorer.touch(address, writes);
    const std::size_t fiber = run->fibers.current();
    if (fiber < outcomes.size() && ranks.inside(static_cast<int>(fiber))) {
      for (std::size_t r = 0; r < outcomes.size(); ++r) touch_tensor(r, false);
    }
  };
  const checker::AtomicsObserver observer{
      [&](const volatile void* address) { return ranks.place(address) >= 0; },
      late_stores,
      [] { return run->fibers.current(); },
      elsewhere,
      [&](const volatile void* address) {
        run->seen[run->fibers.current()][address] = run->writes[address];
        touch(address, false);
        elsewhere(address);
      },
      [&](const volatile void* address) { pause_if(matters_before_write(ranks.place(address))); },
      [&](const volatile void* address) {
        if (!about_sleep(ranks.place(address))) ++run->writes[address];
        touch(address, true);
        elsewhere(address);
      }};
  checker::observe_atomics(&observer);
  try {
    mine.fibers.run(static_cast<int>(fibers), [&](int i) {
      const auto index = static_cast<std::size_t>(i);
      if (index < outcomes.size()) {
        live(ranks, i, scenario, outcomes[index]);
      } else {
        ranks[scenario.aborts[index - outcomes.size()]].abort();
      }
      checker::finish_store();
    });
  } catch (const std::exception& error) {
    // Unfinished ranks hold the locks of their groups, so the groups cannot be closed.
    std::printf("FAILED  %s\n", error.what());
    std::fflush(stdout);
    std::_Exit(1);
  }
  checker::observe_atomics(nullptr);
  run = nullptr;
  check(scenario, outcomes);
  check_decisions(scenario, outcomes);
}

// `lateness` lists the values of AtomicsObserver::late_stores to try.
void explore(const Scenario& scenario, std::size_t delays,
             std::initializer_list<bool> lateness = {false, true}) {
  const SharedMemory memory(scenario.ranks);
  for (const bool late_stores : lateness) {
    checker::Explorer explorer(delays);
    while (explorer.next()) once(scenario, memory, explorer, late_stores);
    std::printf("%zu orders\n", explorer.runs());
  }
}

}  // namespace
}  // namespace pycomm::test

// Replaces the system's functions, so that a wait lets other fibers run and no real time passes.
extern "C" int sched_yield() noexcept {
  pycomm::test::wait_for_write();
  return 0;
}
extern "C" long syscall(long number, ...) noexcept {  // futex: address and operation
  std::va_list arguments;
  va_start(arguments, number);
  va_arg(arguments, void*);
  if (va_arg(arguments, int) == FUTEX_WAIT) pycomm::test::wait_for_write();
  va_end(arguments);
  return 0;
}
extern "C" int nanosleep(const timespec*, timespec*) {
  pycomm::test::wait_for_write();
  return 0;
}
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  const auto* const run = pycomm::test::run;
  return time_point(
      std::chrono::milliseconds(run == nullptr ? 0 : run->milliseconds[run->fibers.current()]));
}

// With an argument, it makes the search that takes more than a minute, and nothing else.
int main(int argc, char**) {
  using namespace pycomm::test;
  using enum pycomm::Algorithm;
  const std::vector<std::pair<const char*, std::function<void()>>> long_test = {
      {"one aborts, all orders", [] { explore({2, {two_shot}, {0}}, Explorer::kAll, {false}); }}};
  const std::vector<std::pair<const char*, std::function<void()>>> tests = {
      {"one aborts", [] { explore({2, {two_shot}, {0}}, 2); }},
      {"two abort", [] { explore({2, {two_shot}, {0, 1}}, 2); }},
      {"one of three aborts", [] { explore({3, {two_shot}, {1}}, 2); }},
      {"an operation later", [] { explore({2, {ring, two_shot}, {1}}, 2); }},
      {"one leaves", [] { explore({3, {two_shot}, {}, 2}, 2); }},
      {"one leaves, one aborts", [] { explore({2, {two_shot, two_shot}, {0}, 1}, 3); }},
      {"across the wrap of epochs",
       [] { explore({2, {one_shot, two_shot, ring, tree}, {}, -1, -1, 0xfffffffe}, 1); }},
      {"one calls something else", [] { explore({3, {two_shot, two_shot}, {}, -1, 1}, 2); }},
      {"a sharded step is aborted",
       [] { explore({2, {two_shot}, {0}, -1, -1, 0, Sharded::updates}, 2); }},
      {"a sharded step that measures is aborted",
       [] { explore({2, {two_shot}, {0}, -1, -1, 0, Sharded::measures}, 2); }},
      {"a sharded step of three ranks is aborted",
       [] { explore({3, {two_shot}, {1}, -1, -1, 0, Sharded::measures}, 2); }},
      {"one leaves before a sharded step",
       [] { explore({3, {tree, two_shot}, {}, 2, -1, 0, Sharded::measures}, 1); }},
      {"one calls another sharded step",
       [] { explore({3, {tree, two_shot}, {}, -1, 1, 0xfffffffe, Sharded::updates}, 1); }},
      {"one aborts a decision",
       [] { explore({2, {one_shot}, {0}, -1, -1, 0, Sharded::no, true}, 3); }},
      {"one of three aborts a decision",
       [] { explore({3, {one_shot}, {1}, -1, -1, 0, Sharded::no, true}, 2); }},
      {"one leaves after a decision",
       [] { explore({3, {one_shot, one_shot}, {}, 2, -1, 0, Sharded::no, true}, 2); }},
      {"nobody fails, all orders", [] { explore({2, {two_shot}, {}}, Explorer::kAll); }},
      {"one leaves, all orders", [] { explore({2, {two_shot}, {}, 1}, Explorer::kAll); }},
      {"one calls something else, all orders",
       [] { explore({2, {two_shot}, {}, -1, 1}, Explorer::kAll); }},
  };
  return run_until_failure(argc > 1 ? long_test : tests);
}

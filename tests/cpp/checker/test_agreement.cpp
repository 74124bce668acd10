// How survivors agree on a smaller group (cpu/faults/shrink.cpp), in all orders of their accesses to the
// window, up to a number of delays (checker/explorer.h). Ranks die before any of their accesses, are
// interrupted, or never come. All ranks that get a group must get the same one, with every rank that
// gets it; a member that lives but does not get it must have left it. No rank may wait for ever.
#include <poll.h>

#include <chrono>
#include <ctime>
#include <map>
#include <optional>
#include <utility>

#include "checker/atomics.h"
#include "checker/clock.h"
#include "checker/explorer.h"
#include "cpu/faults/shrink.h"
#include "cpu/group/operation_lock.h"
#include "support/run_all.h"

namespace pycomm::test {
namespace {

using checker::Explorer;
using checker::Violation;

constexpr std::int64_t kSlice = 1 << 20, kStaging = 8 << 10;
constexpr int kFirstDescriptor = 1 << 20;  // of processes, for poll()

// A rank that dies before one of its accesses, counted from 1.
struct Death {
  int rank, access;
};

struct Scenario {
  int ranks;
  int interrupted = -1;           // the rank whose second look at the others is interrupted
  int late = -1;                  // a rank that comes once all others have ended
  bool patient = true;            // false: ranks wait for others for a moment only
  std::vector<int> absent = {};   // dead from the beginning
  std::vector<int> no_room = {};  // their heaps are full
  std::uint64_t abort = abort_word(Reason::aborted, 0);
};

struct Interrupt {};
const std::atomic<bool> never{false};

struct Outcome {
  bool ended = false;
  std::optional<cpu::Survivors> survivors;
  bool counts = false;  // false if the rank was dead when it got them
};

// The current run. Time passes only while fibers wait.
struct Run {
  using Seen = std::map<const volatile void*, std::int64_t>;  // place -> number of writes
  Explorer& explorer;
  const Scenario& scenario;
  std::vector<Death> deaths;
  checker::Fibers fibers;
  Seen writes = {};
  std::vector<Seen> seen,
      before;  // by fiber: what it has read since it last waited, and until then
  std::vector<std::int64_t> milliseconds;
  std::vector<int> accesses;
  std::vector<char> dead;
  int running;

  Run(Explorer& explorer, const Scenario& scenario, std::vector<Death> deaths)
      : explorer(explorer),
        scenario(scenario),
        deaths(std::move(deaths)),
        fibers(explorer.choice()),
        running(scenario.ranks) {
    const auto count = static_cast<std::size_t>(scenario.ranks);
    seen.resize(count);
    before.resize(count);
    milliseconds.resize(count);
    accesses.resize(count);
    dead.resize(count);
    for (const int r : scenario.absent) dead[static_cast<std::size_t>(r)] = 1;
  }
  bool is_dead(std::size_t fiber) const { return dead[fiber] != 0; }
};
Run* run = nullptr;

void note_read(const volatile void* place) {
  run->seen[run->fibers.current()][place] = run->writes[place];
  run->explorer.touch(place, false);
}
void note_write(const volatile void* place) {
  ++run->writes[place];
  run->explorer.touch(place, true);
}

// Ends the running fiber's part. What it still does, it does after all others have ended.
void end_part() {
  --run->running;
  run->fibers.wait_until([] { return run->running == 0; }, [] { return "is dead"; });
}

// Another fiber may run here, or this rank may die.
void pause() {
  const std::size_t fiber = run->fibers.current();
  if (run->is_dead(fiber)) return;
  run->fibers.pause();
  ++run->accesses[fiber];
  for (const Death& death : run->deaths) {
    if (death.rank != static_cast<int>(fiber) || death.access != run->accesses[fiber]) continue;
    run->dead[fiber] = 1;
    note_write(&run->dead[fiber]);
    end_part();
  }
}

void wait_for_write() {
  if (run == nullptr) return;
  const std::size_t fiber = run->fibers.current();
  if (run->is_dead(fiber)) {
    run->milliseconds[fiber] += 1000;
    return;
  }
  checker::finish_store();
  run->milliseconds[fiber] += static_cast<int>(fiber) == run->scenario.interrupted ? 60 : 2;
  const Run::Seen seen = std::exchange(run->seen[fiber], {});
  if (std::exchange(run->before[fiber], seen) != seen) return;  // later, it polls more places
  const auto has_changed = [](const auto& place) {
    return run->writes[place.first] != place.second;
  };
  run->fibers.wait_until([=] { return std::any_of(seen.begin(), seen.end(), has_changed); },
                         [] { return "polls"; });
}

void interrupt() {
  if (static_cast<int>(run->fibers.current()) == run->scenario.interrupted) throw Interrupt();
}

// A window, which serves many runs one after another, and its ranks.
struct Ranks {
  std::shared_ptr<cpu::Window> window;
  std::vector<std::unique_ptr<cpu::Comm>> comms;

  explicit Ranks(const Scenario& scenario) {
    const auto count = static_cast<std::size_t>(scenario.ranks);
    const int file = cpu::Window::create(scenario.ranks, kSlice, kStaging);
    window = std::make_shared<cpu::Window>(file, scenario.ranks, kSlice, kStaging);
    std::vector<std::shared_ptr<cpu::Process>> processes;
    for (int r = 0; r < scenario.ranks; ++r) {
      processes.push_back(
          std::make_shared<cpu::Process>(kFirstDescriptor + r, cpu::Process::File::pidfd));
    }
    const auto peers = std::make_shared<const cpu::Liveness>(std::vector<int>(count), processes);
    for (int r = 0; r < scenario.ranks; ++r) {
      comms.push_back(std::make_unique<cpu::Comm>(window, peers, r, scenario.ranks, 0,
                                                  std::chrono::hours(1), 0));
      window->control(r).holds.store(0);
    }
    for (const int r : scenario.no_room) {
      (void)window->heap(r)->reserve(kSlice - window->heap_begin());
    }
    window->control(0).abort.store(scenario.abort);
  }

  // Forgets that a run has taken place, and gives the memory of its smaller group back.
  void reset(std::vector<Outcome>& outcomes) const {
    const auto author = static_cast<int>(window->control(0).decision.exchange(0)) - 1;
    if (author >= 0) {
      const auto& leased = outcomes[static_cast<std::size_t>(author)].survivors;
      const auto [offset, id, members] = window->control(author).proposal;
      if (leased) {
        leased->window->control(0).tenant.store(0);
      } else {
        window->cancel(window->place(author, offset, id));
      }
    }
    outcomes.clear();
    for (int r = 0; r < static_cast<int>(comms.size()); ++r) {
      window->control(r).shrinking.store(0);
      window->control(r).proposal = {};
      window->heap(r)->sweep();
    }
  }

  // True for the words with which ranks agree; others do not change in a run.
  bool observes(const volatile void* address) const {
    if (address == &window->control(0).decision) return true;
    for (std::size_t r = 0; r < comms.size(); ++r) {
      if (address == &window->control(static_cast<int>(r)).shrinking) return true;
    }
    return false;
  }
};

void live(const Ranks& ranks, int r, const Scenario& scenario, Outcome& outcome) {
  const auto fiber = static_cast<std::size_t>(r);
  if (run->is_dead(fiber)) {
    --run->running;
    return;
  }
  if (r == scenario.late) {
    run->fibers.wait_until([] { return run->running == 1; }, [] { return "comes late"; });
  }
  const std::chrono::milliseconds patience(scenario.patient ? 10'000 : 1);
  try {
    outcome.survivors = cpu::shrink(*ranks.window, *ranks.comms[fiber], never, patience, interrupt);
  } catch (const Interrupt&) {
  } catch (const cpu::GroupUnusable&) {
  } catch (const cpu::OutOfMemory&) {
  }
  pause();  // its last store may not be visible yet
  checker::finish_store();
  if (run->is_dead(fiber)) return;
  outcome.counts = outcome.survivors.has_value();
  outcome.ended = true;
  --run->running;
}

bool contains(const std::vector<int>& list, int r) {
  return std::find(list.begin(), list.end(), r) != list.end();
}

void check(const Scenario& scenario, const Run& done, const std::vector<Outcome>& outcomes) {
  const cpu::Survivors* first = nullptr;
  for (const Outcome& outcome : outcomes) {
    if (!outcome.counts) continue;
    if (first == nullptr) first = &*outcome.survivors;
    if (outcome.survivors->members != first->members ||
        outcome.survivors->window->id() != first->window->id()) {
      throw Violation("survivors have different groups");
    }
  }
  for (int r = 0; r < scenario.ranks; ++r) {
    const auto& outcome = outcomes[static_cast<std::size_t>(r)];
    const bool dead = done.is_dead(static_cast<std::size_t>(r));
    if (!dead && !outcome.ended) throw Violation("a live rank has not ended");
    const bool member = first != nullptr && contains(first->members, r);
    const bool hopeless = static_cast<int>(scenario.no_room.size()) == scenario.ranks;
    const bool may_fail = dead || hopeless || r == scenario.interrupted || r == scenario.late;
    if (!outcome.counts && !may_fail && (scenario.patient || member)) {
      throw Violation("a survivor has no group");
    }
    if (first == nullptr) continue;
    if (outcome.counts && !member) throw Violation("a rank is in a group that it is no member of");
    if (contains(scenario.absent, r) && member) throw Violation("a dead rank is a member");
    if (r == scenario.late && member) throw Violation("a rank that has not come is a member");
    if (!member || dead || outcome.counts) continue;
    const auto index =
        std::find(first->members.begin(), first->members.end(), r) - first->members.begin();
    if (first->window->control(static_cast<int>(index)).left.load() == 0) {
      throw Violation("a member that lives never comes");
    }
  }
}

// True if all deaths have happened.
bool once(const Ranks& ranks, const Scenario& scenario, std::vector<Death> deaths,
          Explorer& explorer, bool late_stores) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(scenario.ranks));
  Run mine(explorer, scenario, std::move(deaths));
  run = &mine;
  const auto before = [](const volatile void*) { pause(); };
  const checker::AtomicsObserver observer{
      [&](const volatile void* address) { return ranks.observes(address); },
      late_stores,
      [] { return run->fibers.current(); },
      before,
      note_read,
      before,
      note_write};
  checker::observe_atomics(&observer);
  mine.fibers.run(scenario.ranks,
                  [&](int r) { live(ranks, r, scenario, outcomes[static_cast<std::size_t>(r)]); });
  checker::observe_atomics(nullptr);
  run = nullptr;
  check(scenario, mine, outcomes);
  ranks.reset(outcomes);
  const auto died = [&](const Death& death) {
    return mine.is_dead(static_cast<std::size_t>(death.rank));
  };
  return std::all_of(mine.deaths.begin(), mine.deaths.end(), died);
}

// Explores all orders; true if the deaths happen in any of them.
bool explore(const Scenario& scenario, const std::vector<Death>& deaths, std::size_t delays,
             std::size_t& orders) {
  bool all_died = false;
  const Ranks ranks(scenario);
  for (const bool late_stores : {false, true}) {
    if (late_stores && !deaths.empty()) continue;
    Explorer explorer(delays);
    while (explorer.next()) {
      try {
        all_died |= once(ranks, scenario, deaths, explorer, late_stores);
      } catch (const std::exception& error) {
        std::printf("FAILED  %s\n", error.what());
        std::fflush(stdout);
        std::_Exit(1);  // fibers that have not ended hold what they hold
      }
    }
    orders += explorer.runs();
  }
  return all_died;
}

// Up to `most` deaths of the last ranks and of rank 0, each before every access in turn.
void explore_deaths(const Scenario& scenario, int most, std::size_t delays) {
  std::size_t orders = 0;
  std::function<bool(std::vector<Death>)> next = [&](std::vector<Death> deaths) {
    const bool died = explore(scenario, deaths, delays, orders);
    if (!died || static_cast<int>(deaths.size()) == most) return died;
    const int victim = deaths.empty() ? 0 : scenario.ranks - static_cast<int>(deaths.size());
    deaths.push_back({victim, 1});
    while (next(deaths)) ++deaths.back().access;
    return true;
  };
  next({});
  std::printf("%zu orders\n", orders);
}

}  // namespace
}  // namespace pycomm::test

// Replaces the system's functions: a process has ended if its rank is dead, and no real time passes.
extern "C" int poll(pollfd* fds, nfds_t count, int) {
  using pycomm::test::run;
  pycomm::test::pause();
  int ended = 0;
  for (nfds_t i = 0; i < count; ++i) {
    const auto r = static_cast<std::size_t>(fds[i].fd - pycomm::test::kFirstDescriptor);
    pycomm::test::note_read(&run->dead[r]);
    fds[i].revents = run->dead[r] != 0 ? POLLIN : 0;
    ended += run->dead[r];
  }
  return ended;
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

int main() {
  using namespace pycomm::test;
  using pycomm::Reason;
  const std::vector<std::pair<const char*, std::function<void()>>> tests = {
      {"two ranks, one death, all orders", [] { explore_deaths({.ranks = 2}, 1, Explorer::kAll); }},
      {"three ranks, two deaths", [] { explore_deaths({.ranks = 3}, 2, 1); }},
      {"three ranks, one death", [] { explore_deaths({.ranks = 3}, 1, 1); }},
      {"four ranks, two deaths", [] { explore_deaths({.ranks = 4}, 2, 0); }},
      {"four ranks, one dead, one dies", [] { explore_deaths({.ranks = 4, .absent = {2}}, 1, 1); }},
      {"one is interrupted", [] { explore_deaths({.ranks = 3, .interrupted = 1}, 1, 1); }},
      {"the first of two is interrupted, all orders",
       [] { explore_deaths({.ranks = 2, .interrupted = 0}, 0, Explorer::kAll); }},
      {"the other of two is interrupted, all orders",
       [] { explore_deaths({.ranks = 2, .interrupted = 1}, 0, Explorer::kAll); }},
      {"one comes too late",
       [] { explore_deaths({.ranks = 3, .late = 2, .patient = false}, 1, 1); }},
      {"one has not answered",
       [] {
         explore_deaths({.ranks = 3, .late = 1, .abort = pycomm::timeout_word(1, 0, 1)}, 0, 2);
       }},
      {"the first has no room", [] { explore_deaths({.ranks = 3, .no_room = {0}}, 1, 1); }},
      {"nobody has room", [] { explore_deaths({.ranks = 2, .no_room = {0, 1}}, 1, 1); }},
  };
  return run_until_failure(tests);
}

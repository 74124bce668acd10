#include "cpu/observe/window_reader.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "core/message.h"
#include "cpu/executor/waiting.h"

namespace pycomm::cpu {
namespace {

std::int64_t stride_of(const Header& header) {
  return window_slice_bytes(static_cast<int>(header.ranks), header.staging_bytes);
}

// Returns a header only if the whole window lies in the file.
Header checked_header(int fd, std::int64_t position) {
  Header header{};
  struct stat file = {};
  const bool is_window = pread(fd, &header, sizeof(header), position) == sizeof(header) &&
                         header.magic == kMagic && fstat(fd, &file) == 0;
  PYCOMM_CHECK(is_window, "the file has no pycomm window at byte " + std::to_string(position));
  if (header.layout != kLayout)
    throw std::runtime_error("another version of pycomm made the window");
  const bool fits = header.ranks > 0 && header.ranks <= static_cast<std::int64_t>(kField) &&
                    header.staging_bytes > 0 && header.staging_bytes <= file.st_size &&
                    header.ranks <= (file.st_size - position) / stride_of(header);
  PYCOMM_CHECK(fits, "the window's header is damaged");
  return header;
}

std::vector<RecordedTicks> last_entries(const Record* records, std::size_t most) {
  std::vector<RecordedTicks> entries;
  for (std::uint32_t i = 0; i < kRecords; ++i) {
    if (const std::optional<RecordedTicks> entry = records[i].read()) entries.push_back(*entry);
  }
  std::sort(entries.begin(), entries.end(),
            [](const RecordedTicks& a, const RecordedTicks& b) { return a.entered < b.entered; });
  if (entries.size() > most) {
    entries.erase(entries.begin(), entries.end() - static_cast<std::ptrdiff_t>(most));
  }
  return entries;
}

// How far a device is with one kind of launches.
struct Reached {
  std::uint32_t number;
  bool done;
  double since;

  // The braces have the word read first: its rank stores the time first, so a time is never older than
  // the word.
  Reached(const Control& control, bool captured, const TickScale& scale)
      : Reached{control.progress[captured].load(std::memory_order_acquire),
                scale.seconds(control.progress_seen[captured].load(std::memory_order_acquire))} {}
  Reached(std::uint64_t word, double seen)
      : number(number_of(word)), done(word == done_word(number)), since(seen) {}

  Launched::State state() const { return done ? Launched::State::done : Launched::State::running; }
};

Launched launch_of(const RecordedTicks& entry, const Reached& reached, const TickScale& scale) {
  const bool captured = entry.done == kCaptured;
  const double launched = scale.seconds(entry.entered);
  Launched launch{entry.operation, entry.number, captured, Launched::State::launched,
                  launched,        launched,     {}};
  if (reached.number == entry.number) {
    launch.state = reached.state();
    launch.since = reached.since;
  } else if (!captured && pycomm::reached(reached.number, entry.number)) {
    launch.state = Launched::State::done;
  }
  return launch;
}

// An operation that the device was in last is kept, however many have been launched since.
std::vector<Launched> launched_of(const Slice& slice, std::size_t most, const TickScale& scale) {
  const Reached all[] = {{slice.control, false, scale}, {slice.control, true, scale}};
  std::vector<Launched> launched;
  for (const RecordedTicks& entry : last_entries(slice.launches, kRecords)) {
    launched.push_back(launch_of(entry, all[entry.done == kCaptured], scale));
    launched.back().subject = subject_of(slice.control, slice.subjects, entry.subject);
  }
  const auto was_in = [&](const Launched& launch) {
    return launch.number == all[launch.captured].number;
  };
  for (const bool captured : {false, true}) {
    const auto& [number, done, since] = all[captured];
    const bool found = std::any_of(launched.begin(), launched.end(), [&](const Launched& launch) {
      return launch.captured == captured && was_in(launch);
    });
    if (found || number == 0) continue;
    launched.insert(launched.begin(),
                    {{}, number, captured, all[captured].state(), since, since, {}});
  }
  std::size_t left = launched.size();
  std::erase_if(launched, [&](const Launched& launch) { return left-- > most && !was_in(launch); });
  return launched;
}

}  // namespace

std::string subject_of(const Control& control, const Subject* subjects, std::uint32_t number) {
  if (number == 0 || control.subjects.load(std::memory_order_acquire) == 0) return {};
  return subjects[number % kSubjects].read(number);
}

MemoryFigures memory_of(const Control& control) {
  MemoryFigures figures;
  for (std::size_t i = 0; i < figures.size(); ++i) {
    figures[i] = control.memory[i].load(std::memory_order_relaxed);
  }
  return figures;
}

RankState state_of(const Slice& slice, int ranks, std::size_t most, const TickScale& scale) {
  const Control& control = slice.control;
  RankState state;
  const std::uint64_t identity = control.identity.load(std::memory_order_acquire);
  state.rank = static_cast<int>(identity & 0xffffffffu);
  state.pid = static_cast<int>(identity >> 32);
  state.gone = control.left.load(std::memory_order_acquire) != 0;
  if (const auto waiting = parse_waiting(control.waiting.load(std::memory_order_acquire), ranks)) {
    state.waits_for = waiting->rank;
  } else if (const int sender = awaited_sender(control.p2p_waiting.load(), Clock::now());
             sender < ranks) {
    state.waits_for = sender;
  }
  for (const RecordedTicks& entry : last_entries(slice.records, most)) {
    const double entered = scale.seconds(entry.entered);
    const double done = entry.done == kNotDone   ? 0
                        : entry.done == kUntimed ? entered
                                                 : scale.seconds(entry.done);
    state.recorded.push_back({entry.operation, entry.number, entered, done,
                              subject_of(control, slice.subjects, entry.subject)});
  }
  state.launched = launched_of(slice, most, scale);
  state.memory = memory_of(control);
  return state;
}

WindowReader::WindowReader(int fd, std::int64_t position)
    : header_(checked_header(fd, position)),
      slices_(fd, position, header_.ranks * stride_of(header_), Mapping::Access::read) {}

GroupState WindowReader::state(std::size_t most) const {
  const auto ranks = static_cast<int>(header_.ranks);
  const TickScale scale = TickScale::now();
  const auto slice = [&](int r) { return slices_.data() + r * stride_of(header_); };
  const auto control = [&](int r) -> const Control& {
    return *reinterpret_cast<const Control*>(slice(r));
  };
  GroupState group{scale.time(), ranks, control(0).abort.load() != 0, {}, {}};
  for (int r = 0; r < ranks; ++r) {
    if (control(r).identity.load(std::memory_order_acquire) == 0) continue;
    RankState rank =
        state_of({control(r), records_of(slice(r), ranks), launches_of(slice(r), ranks),
                  subjects_of(slice(r), stride_of(header_))},
                 ranks, most, scale);
    if (rank.waits_for >= 0) {
      const std::uint64_t awaited = control(rank.waits_for).identity.load();
      rank.waits_for = awaited == 0 ? -1 : static_cast<int>(awaited & 0xffffffffu);
    }
    group.ranks.push_back(std::move(rank));
  }
  return group;
}

}  // namespace pycomm::cpu

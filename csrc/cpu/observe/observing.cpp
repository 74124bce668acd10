// What others see of a rank: its state, its statistics, what its operations are about, and what it has
// launched on its device.
#include <cmath>
#include <system_error>

#include "cpu/group/group.h"
#include "cpu/observe/window_reader.h"

namespace pycomm::cpu {
namespace {

// What the operations that a thread calls are about.
struct Calling {
  const Group* group = nullptr;
  std::uint32_t subject = 0;
};
thread_local Calling calling;

// One scale for all statistics, so that times never decrease from one to the next.
double seconds_per_tick() {
  static const double seconds = TickScale::now().seconds_per_tick();
  return seconds;
}

}  // namespace

GroupState Group::state(std::size_t most, bool only_own) {
  if (forked() || closed_) check_usable();
  const std::lock_guard lock(departing_mutex_);
  if (departed_) throw GroupUnusable("group is closed");
  return comm_.state(most, only_own);
}

Group::Statistics Group::statistics() {
  if (forked() || closed_) check_usable();
  const std::lock_guard lock(departing_mutex_);
  if (departed_) throw GroupUnusable("group is closed");
  Statistics all{seconds_per_tick(),
                 {},
                 comm_.recorder().counters().read(),
                 on_device_.read(),
                 memory_of(window_->control(comm_.rank()))};
  for (int r = 0; r < comm_.size(); ++r) {
    const auto [own, blocked] = comm_.own_and_blocked(r);
    all.ranks.push_back({comm_.number(r), own, blocked});
  }
  return all;
}

void Group::set_subject(const std::string& text) {
  calling = {};
  if (text.empty() || forked()) return;
  const std::lock_guard lock(departing_mutex_);
  if (departed_) return;
  auto found = subjects_.find(text);
  // A text in the older half of the ring is written again: it must outlive the records that refer
  // to it, and their ring has half as many entries.
  if (found == subjects_.end() || last_subject_ - found->second >= kSubjects / 2) {
    if (last_subject_ % kSubjects == 0) subjects_.clear();  // the ring begins anew
    try {
      last_subject_ = window_->add_subject(comm_.rank(), text);
    } catch (const std::system_error&) {  // no memory: the operation matters more
      return;
    }
    found = subjects_.insert_or_assign(text, last_subject_).first;
  }
  calling = {this, found->second};
  has_subjects_.store(true, std::memory_order_relaxed);
}

std::string Group::subject() {
  if (forked()) return {};  // a thread of the parent may have held the lock
  const std::lock_guard lock(departing_mutex_);
  return departed_ ? std::string() : comm_.subject(subject_number());
}

std::uint32_t Group::calling_subject() const { return calling.group == this ? calling.subject : 0; }

std::uint32_t Group::record_launch(const Operation& operation, bool captured) {
  const std::lock_guard lock(departing_mutex_);
  const std::uint32_t number = ++last_launch_;
  if (departed_) return number;
  Record& record = window_->launches(comm_.rank())[number % kRecords];
  record.enter(operation, number, subject_number());
  if (captured) record.end(kCaptured);
  return number;
}

void Group::show_progress(const DeviceProgress& progress) {
  const std::lock_guard lock(departing_mutex_);
  if (departed_) return;
  Control& mine = window_->control(comm_.rank());
  for (std::size_t i = 0; i < progress.size(); ++i) {
    if (mine.progress[i].load(std::memory_order_relaxed) == progress[i]) continue;
    mine.progress_seen[i].store(ticks(), std::memory_order_release);
    mine.progress[i].store(progress[i], std::memory_order_release);
  }
}

void Group::show_memory(const MemoryFigures& figures) {
  if (forked()) return;
  const std::lock_guard lock(departing_mutex_);
  if (departed_) return;
  Control& mine = window_->control(comm_.rank());
  for (std::size_t i = 0; i < figures.size(); ++i) {
    mine.memory[i].store(figures[i], std::memory_order_relaxed);
  }
}

void Group::count_on_device(const TimedOperation& ended) {
  const auto in_ticks = [](std::int64_t nanoseconds) {
    return std::llround(static_cast<double>(nanoseconds) * 1e-9 / seconds_per_tick());
  };
  const std::int64_t whole = in_ticks(ended.whole);
  const Counters::Moments moments{0, whole - in_ticks(ended.exchange), whole};
  Operation operation{ended.collective};
  operation.codec.kind = ended.codec;
  on_device_.add(operation, ended.bytes, 1, moments);
}

CollectiveError Group::with_report(const CollectiveError& error, std::uint32_t launch) {
  const std::lock_guard lock(departing_mutex_);
  if (departed_) return error;
  const auto recorded = window_->launches(comm_.rank())[launch % kRecords].read();
  const bool found = recorded && recorded->number == launch;
  CollectiveError known = error.about(found ? comm_.subject(recorded->subject) : std::string());
  known.group = comm_.report();
  return known;
}

}  // namespace pycomm::cpu

#include "checker/memory.h"

#include <sys/mman.h>

namespace pycomm::checker {
namespace {

constexpr std::size_t kAddresses = std::size_t{8} << 30;
constexpr Symbol kNothing = -1;
constexpr std::int64_t kGap = 4096;  // between areas, so that overruns hit none

}  // namespace

Memory::Memory() {
  void* const addresses =
      mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) throw std::bad_alloc();
  base_ = next_ = static_cast<std::byte*>(addresses);
}

Memory::~Memory() { munmap(base_, kAddresses); }

std::byte* Memory::add(std::string name, int owner, std::int64_t bytes, bool shared) {
  std::byte* const begin = next_;
  areas_[begin] = {std::move(name), owner, bytes, shared, {}};
  next_ += (bytes + 2 * kGap - 1) / kGap * kGap;
  if (next_ > base_ + kAddresses) throw std::bad_alloc();
  return begin;
}

const Memory::Area& Memory::area(const std::byte* address) const {
  const auto after = areas_.upper_bound(address);
  if (after == areas_.begin()) throw Violation("an address outside of all memory");
  return std::prev(after)->second;
}

std::int64_t Memory::offset(const std::byte* address) const {
  return address - std::prev(areas_.upper_bound(address))->first;
}

Memory::Area& Memory::enter(const Thread& thread, const std::byte* address, std::int64_t bytes) {
  Area& found = const_cast<Area&>(area(address));
  const std::int64_t begin = offset(address);
  const Range range{thread, "uses", found, begin, begin + bytes};
  if (bytes < 0 || range.end > found.bytes) throw Violation(text(range) + ", beyond its end");
  if (!found.shared && found.owner != thread.process) {
    throw Violation(text(range) + ", which is not shared");
  }
  split(found, range.begin);
  split(found, range.end);
  return found;
}

void Memory::split(Area& area, std::int64_t at) {
  const auto after = area.runs.lower_bound(at);
  if (after == area.runs.begin()) return;
  auto& [begin, run] = *std::prev(after);
  if (run.end <= at) return;
  // A part of an element has no meaning.
  if ((at - begin) % run.unit.bytes != 0) run.unit = {1}, run.symbol = kNothing;
  Run rest = run;
  rest.element += (at - begin) / run.unit.bytes * run.unit.elements;
  run.end = at;
  area.runs.emplace(at, rest);
}

std::string Memory::text(const Range& range) const {
  return range.thread.when(range.thread.now()) + " " + range.verb + " bytes " +
         std::to_string(range.begin) + " to " + std::to_string(range.end) + " of " +
         range.area.name;
}

void Memory::race(const Range& range, const char* other, int thread, Time time) const {
  throw Violation(text(range) + ": nothing orders this after the " + other + " by " +
                  threads_[static_cast<std::size_t>(thread)]->when(time));
}

void Memory::check_written(const Range& range, const Run& run) const {
  if (range.thread.clock[run.writer] < run.written) race(range, "write", run.writer, run.written);
}

void Memory::check_unread(const Range& range, const Run& run) const {
  for (const Thread* const reader : threads_) {
    const Time time = run.read[static_cast<std::size_t>(reader->index)];
    if (range.thread.clock[reader->index] < time) race(range, "read", reader->index, time);
  }
}

// The contents of a range whose ends coincide with ends of runs.
Pieces Memory::pieces_in(const Range& range, Unit unit) const {
  Pieces pieces;
  std::int64_t at = range.begin;
  while (at < range.end) {
    const auto found = range.area.runs.find(at);
    if (found == range.area.runs.end())
      throw Violation(text(range) + ", of which nobody wrote all");
    const Run& run = found->second;
    if (run.unit != unit || run.symbol == kNothing)
      throw Violation(text(range) + ", which hold something else");
    const Piece piece{(run.end - at) / unit.bytes, run.symbol, run.element};
    const bool goes_on =
        !pieces.empty() && pieces.back().symbol == piece.symbol &&
        pieces.back().element + pieces.back().units * unit.elements == piece.element;
    if (goes_on) {
      pieces.back().units += piece.units;
    } else {
      pieces.push_back(piece);
    }
    at = run.end;
  }
  return pieces;
}

void Memory::read_runs(const Range& range, Runs& runs) {
  for (auto run = runs.lower_bound(range.begin); run != runs.end() && run->first < range.end;
       ++run) {
    check_written(range, run->second);
    run->second.read[static_cast<std::size_t>(range.thread.index)] = range.thread.now();
  }
}

Pieces Memory::read(const Thread& thread, const std::byte* from, std::int64_t units, Unit unit) {
  if (units == 0) return {};
  Area& area = enter(thread, from, units * unit.bytes);
  const std::int64_t begin = offset(from);
  const Range range{thread, "reads", area, begin, begin + units * unit.bytes};
  read_runs(range, area.runs);
  return pieces_in(range, unit);
}

Cargo Memory::read_bytes(const Thread& thread, const std::byte* from, std::int64_t bytes) {
  if (bytes == 0) return {};
  Area& area = enter(thread, from, bytes);
  const std::int64_t begin = offset(from);
  const Range range{thread, "reads", area, begin, begin + bytes};
  read_runs(range, area.runs);
  Cargo cargo;
  for (std::int64_t at = begin; at < range.end; at += cargo.back().bytes) {
    const auto found = area.runs.find(at);
    if (found == area.runs.end()) throw Violation(text(range) + ", of which nobody wrote all");
    const Run& run = found->second;
    cargo.push_back({run.end - at, run.symbol, run.element, run.unit});
  }
  return cargo;
}

void Memory::write(const Thread& thread, std::byte* to, const Pieces& pieces, Unit unit) {
  Cargo cargo;
  for (const Piece& piece : pieces) {
    cargo.push_back({piece.units * unit.bytes, piece.symbol, piece.element, unit});
  }
  write_bytes(thread, to, cargo);
}

void Memory::write_bytes(const Thread& thread, std::byte* to, const Cargo& cargo) {
  std::int64_t bytes = 0;
  for (const Load& load : cargo) bytes += load.bytes;
  if (bytes == 0) return;
  Area& area = enter(thread, to, bytes);
  std::int64_t at = offset(to);
  const Range range{thread, "writes", area, at, at + bytes};
  const auto first = area.runs.lower_bound(range.begin), end = area.runs.lower_bound(range.end);
  for (auto run = first; run != end; ++run) {
    check_written(range, run->second);
    check_unread(range, run->second);
  }
  area.runs.erase(first, end);
  for (const Load& load : cargo) {
    if (load.bytes == 0) continue;
    const std::int64_t stop = at + load.bytes;
    area.runs[at] = {stop, load.symbol, load.element, load.unit, thread.index, thread.now(), {}};
    at = stop;
  }
}

void Memory::claim(const Thread& thread, std::byte* to, std::int64_t bytes) {
  write_bytes(thread, to, {{bytes, kNothing, 0, {1}}});
}

Pieces Memory::take(const Thread& thread, const Thread& writer, std::byte* from, std::int64_t units,
                    Unit unit) {
  Area& area = enter(thread, from, units * unit.bytes);
  const std::int64_t begin = offset(from);
  const Range range{thread, "takes", area, begin, begin + units * unit.bytes};
  Pieces pieces = pieces_in(range, unit);
  for (auto run = area.runs.find(begin); run != area.runs.end() && run->first < range.end; ++run) {
    if (run->second.writer != writer.index) check_written(range, run->second);
    run->second.writer = thread.index;
    run->second.written = thread.now();
  }
  return pieces;
}

}  // namespace pycomm::checker

// The memory of all ranks, without bytes. For each range of addresses, it records what the range
// holds, which thread wrote it last, and which threads have read it since. An access is a race if
// the clocks do not order it after an earlier conflicting one.
#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "checker/clock.h"
#include "checker/symbols.h"

namespace pycomm::checker {

// A unit of `bytes` bytes stands for `elements` elements.
struct Unit {
  std::int64_t bytes;
  std::int64_t elements = 1;
  bool operator==(const Unit&) const = default;
};

// Consecutive units that hold consecutive elements of the same kind.
struct Piece {
  std::int64_t units;
  Symbol symbol;
  std::int64_t element;
  bool operator==(const Piece&) const = default;
};
using Pieces = std::vector<Piece>;

// Consecutive bytes that hold elements of the same kind. Loads are moved without being interpreted.
struct Load {
  std::int64_t bytes;
  Symbol symbol;
  std::int64_t element;
  Unit unit;
};
using Cargo = std::vector<Load>;

// Calls visit(units, piece of every list) for parts in which no list is cut. All lists have the
// same length.
template <class Visit>
void zip(const std::vector<Pieces>& lists, Unit unit, Visit visit) {
  std::vector<std::size_t> at(lists.size());
  std::vector<std::int64_t> done(lists.size());
  std::vector<Piece> pieces(lists.size());
  while (at[0] < lists[0].size()) {
    std::int64_t units = lists[0][at[0]].units - done[0];
    for (std::size_t i = 0; i < lists.size(); ++i) {
      units = std::min(units, lists[i][at[i]].units - done[i]);
      pieces[i] = lists[i][at[i]];
      pieces[i].element += done[i] * unit.elements;
    }
    visit(units, pieces);
    for (std::size_t i = 0; i < lists.size(); ++i) {
      done[i] += units;
      if (done[i] < lists[i][at[i]].units) continue;
      done[i] = 0;
      ++at[i];
    }
  }
}

class Memory {
 public:
  Memory();
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Introduces a thread, which must outlive the memory. Messages identify threads by index.
  void introduce(const Thread& thread) { threads_.push_back(&thread); }
  // Adds an area of a rank. Only shared areas may be used by other threads. Nothing can be stored
  // at the addresses, but pointer arithmetic works.
  std::byte* add(std::string name, int owner, std::int64_t bytes, bool shared);
  bool contains(const void* address) const { return base_ <= address && address < next_; }
  int owner(const std::byte* address) const { return area(address).owner; }
  bool shared(const std::byte* address) const { return area(address).shared; }

  Pieces read(const Thread& thread, const std::byte* from, std::int64_t units, Unit unit);
  void write(const Thread& thread, std::byte* to, const Pieces& pieces, Unit unit);
  Cargo read_bytes(const Thread& thread, const std::byte* from, std::int64_t bytes);
  void write_bytes(const Thread& thread, std::byte* to, const Cargo& cargo);
  // Marks memory that the thread may write from now on.
  void claim(const Thread& thread, std::byte* to, std::int64_t bytes);
  // Reads what `writer` has written and becomes the last writer. No clock has to order the two,
  // because the data itself signals its arrival.
  Pieces take(const Thread& thread, const Thread& writer, std::byte* from, std::int64_t units,
              Unit unit);

 private:
  struct Run {
    std::int64_t end;
    Symbol symbol;
    std::int64_t element;
    Unit unit;
    int writer;
    Time written;
    std::array<Time, kMostThreads> read;
  };
  using Runs = std::map<std::int64_t, Run>;  // by first byte
  struct Area {
    std::string name;
    int owner;
    std::int64_t bytes;
    bool shared;
    Runs runs;
  };
  struct Range {
    const Thread& thread;
    const char* verb;
    const Area& area;
    std::int64_t begin, end;
  };

  const Area& area(const std::byte* address) const;
  Area& enter(const Thread& thread, const std::byte* address, std::int64_t bytes);
  std::int64_t offset(const std::byte* address) const;
  void split(Area& area, std::int64_t at);
  void read_runs(const Range& range, Runs& runs);
  Pieces pieces_in(const Range& range, Unit unit) const;
  void check_written(const Range& range, const Run& run) const;
  void check_unread(const Range& range, const Run& run) const;
  std::string text(const Range& range) const;
  [[noreturn]] void race(const Range& range, const char* other, int thread, Time time) const;

  std::byte* base_;
  std::byte* next_;
  std::map<const std::byte*, Area> areas_;
  std::vector<const Thread*> threads_;
};

}  // namespace pycomm::checker

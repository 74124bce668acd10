// The checker's executor of the algorithms in core/. It moves symbols instead of bytes
// (checker/memory.h). A wait acquires the clock of exactly the step that it waits for. Since flags
// only grow and waits block until "at least step", a single run shows what holds for all
// interleavings.
#pragma once

#include <array>
#include <functional>

#include "checker/memory.h"
#include "core/executor.h"
#include "core/layout.h"
#include "core/operation.h"

namespace pycomm::checker {

class Fibers;

// The differences between executors.
struct Layout {
  std::int64_t staging_bytes = 64 << 10;
  std::int64_t packet_bytes = 64;  // the largest tensor that is sent in packets
  std::uint32_t first_epoch = 0;   // where operations and flags start to count
};

// A word that several threads write, sequentially consistent.
struct Word {
  int value = 0;
  Clock clock;
};

// What the ranks of one node share, in the order of cpu/memory/window.h.
struct Member {
  Thread* thread;
  std::byte* announcements[2];
  std::byte* staging[2];
  std::vector<std::byte*> packets[2];  // by sender
  std::byte* taken;
  // By sender and sequence modulo 2: the operation whose packets the sender has put here.
  std::vector<std::array<std::uint32_t, 2>> put;

  struct Announced {
    Operation operation;
    std::byte* input;
    std::byte* output;
    Preflight preflight;
    Clock clock;
  };
  std::vector<Announced> announced;       // by phase, from 1 on
  std::vector<Clock> signals[kChannels];  // all signals so far
  Word in_peers_heaps;                    // see cpu/executor/comm.h
  bool dead = false;
};

struct Node {
  Node(Memory& memory, Symbols& symbols, Fibers& fibers, const Layout& layout,
       std::vector<Thread*> threads);

  Memory& memory;
  Symbols& symbols;
  Fibers& fibers;
  const Layout layout;
  std::vector<Member> members;
  Word abort;
};

// Thrown if the operation cannot succeed because a rank has failed.
struct Stopped {};

class Comm {
 public:
  static constexpr bool kCoded = false;

  Comm(Node& node, int rank);

  // As in cpu::Comm.
  void begin(const Operation& operation, const void* input, void* output,
             void (*interrupt)() = nullptr, Preflight preflight = {});
  void begin_phase(const Operation& operation, const void* input, void* output,
                   Preflight preflight = {});
  void finish();
  void leave_peers_heaps();
  // After Stopped: abort() tells all ranks; retreat() returns when no other rank uses this rank's
  // tensors any more.
  void abort() { store(node_.abort, 1); }
  void retreat();
  void die() { member(rank_).dead = true; }
  bool dead() const { return member(rank_).dead; }
  bool stopped() const { return node_.abort.value != 0; }
  void check_aborted();
  // Makes this rank fail in a wait of the next operation, counted from 0.
  static constexpr int kNeverFails = -1;
  void fail_at(int wait) { fail_at_ = wait; }
  int waits() const { return waits_; }  // in this operation
  void count_wait() {
    if (waits_++ == fail_at_) throw Stopped();
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(node_.members.size()); }
  int root() const { return operation_.root; }
  std::int64_t count() const { return operation_.count; }
  std::int64_t block() const { return operation_.count; }
  std::int64_t elements(std::int64_t bytes) const { return bytes / unit_.bytes; }
  std::int64_t line() const { return elements(kLine); }
  bool zero_copy() const { return zero_copy_; }
  Location input() const { return {input_, rank_}; }
  Location output() const { return {output_, rank_}; }
  Location input(int r) const { return {announced(r).input, r}; }
  Location output(int r) const { return {announced(r).output, r}; }
  Location slot(int r, std::int64_t i) const {
    return {member(r).staging[sequence_ & 1u] + i * slot_bytes_, r};
  }
  std::int64_t slot_count() const { return elements(slot_bytes_); }
  Location at(Location location, std::int64_t elements) const {
    return {location.data + elements * unit_.bytes, location.rank};
  }

  void announce() {
    publish();
    await_announcements();
  }
  void publish();
  void await_announcements();
  Preflight preflight() const;
  std::byte* announced_area(int r, std::int64_t) const { return announced(r).input; }

  bool fits_packets() const { return count() * unit_.bytes <= node_.layout.packet_bytes; }
  void put_packets(Location from);
  void take_packets();
  Location taken(int r) const;

  void signal(int channel);
  void wait(int r, int channel, std::int64_t step);
  void wait_all(int channel, std::int64_t step);

  void copy(Location to, Location from, std::int64_t n);
  template <class To, class From>
  void reduce(int n_to, To to, int n_from, From from, std::int64_t n, bool last) {
    std::vector<Location> targets, sources;
    for (int i = 0; i < n_to; ++i) targets.push_back(to(i));
    for (int i = 0; i < n_from; ++i) sources.push_back(from(i));
    add(targets, sources, n, last);
  }
  template <class To, class From>
  void reduce_in_switch(To to, From from, std::int64_t n) {
    reduce(size(), to, size(), from, n, true);
  }

  // For executors on top of this one.
  Pieces read(Location from, std::int64_t units, Unit unit);
  void write(Location to, const Pieces& pieces, Unit unit);
  Pieces sum(const std::vector<Pieces>& terms, bool last) { return sum(terms, last, unit_); }
  Pieces sum(const std::vector<Pieces>& terms, bool last, Unit unit);
  Symbols& symbols() { return node_.symbols; }
  Memory& memory() { return node_.memory; }
  Fibers& fibers() { return node_.fibers; }
  Thread& thread() const { return me(); }
  const Operation& called() const { return called_; }
  std::uint32_t sequence() const { return sequence_; }
  // Private memory of this rank.
  std::byte* allocate(std::int64_t bytes) const {
    return node_.memory.add(me().name + "'s scratch", me().index, bytes, false);
  }
  Unit unit() const { return unit_; }
  std::int64_t slot_bytes() const { return slot_bytes_; }
  // The parity of the next operation.
  std::uint32_t next_parity() const { return next_sequence(sequence_) & 1u; }
  // The number of signals per channel in all operations so far. They must be the same on every
  // rank.
  std::array<std::size_t, kChannels> signalled() const;
  // True if any rank has signalled on the channel in this operation.
  bool anyone_signalled(int channel) const;

 private:
  Member& member(int r) const { return node_.members[static_cast<std::size_t>(r)]; }
  Thread& me() const { return *member(rank_).thread; }
  const Member::Announced& announced(int r) const { return member(r).announced[phase_]; }
  std::byte* packets(int to, int from) const {
    return member(to).packets[sequence_ & 1u][static_cast<std::size_t>(from)];
  }
  template <class Condition>
  void await(int r, Condition has_come, const std::string& what);
  void add(const std::vector<Location>& to, const std::vector<Location>& from, std::int64_t n,
           bool last);
  void check_apart(Location a, Location b, std::int64_t n) const;
  int load(Word& word);
  void store(Word& word, int value);

  Node& node_;
  const int rank_;
  const std::int64_t slot_bytes_;
  std::uint32_t sequence_;
  std::size_t phase_ = 0;
  std::size_t started_[kChannels]{};
  Operation called_, operation_;
  Preflight preflight_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  Unit unit_{1};
  bool zero_copy_ = false;
  bool exposed_ = false;
  int waits_ = 0;
  int fail_at_ = kNeverFails;
};

static_assert(PacketExecutor<Comm>);

// The running rank, for code that has no reference to it.
Comm& running();
void set_running(std::function<Comm&()> find);

}  // namespace pycomm::checker

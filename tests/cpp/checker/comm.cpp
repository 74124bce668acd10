#include "checker/comm.h"

#include "checker/fibers.h"
#include "core/algorithms/table.h"

namespace pycomm::checker {
namespace {

// An announcement and a packet are each written at once.
constexpr Unit kAnnouncement{kLine};

std::function<Comm&()> find_running;

std::int64_t packet_room(const Layout& layout) { return 2 * layout.packet_bytes; }

}  // namespace

Node::Node(Memory& memory, Symbols& symbols, Fibers& fibers, const Layout& layout,
           std::vector<Thread*> threads)
    : memory(memory), symbols(symbols), fibers(fibers), layout(layout) {
  for (Thread* const thread : threads) {
    Member& member = members.emplace_back();
    member.thread = thread;
    const auto add = [&](const std::string& name, std::int64_t bytes, bool shared) {
      return memory.add(thread->name + "'s " + name, thread->index, bytes, shared);
    };
    for (int parity = 0; parity < 2; ++parity) {
      const std::string which = parity == 0 ? ", even" : ", odd";
      member.announcements[parity] = add("announcement" + which, kLine, true);
      member.staging[parity] = add("staging" + which, layout.staging_bytes / 2, true);
      for (const Thread* const from : threads) {
        member.packets[parity].push_back(
            add("packets of " + from->name + which, packet_room(layout), true));
      }
    }
    const auto ranks = static_cast<std::int64_t>(threads.size());
    member.taken = add("taken packets", ranks * layout.packet_bytes, false);
    member.put.resize(threads.size());
    member.announced.resize(1);
  }
}

Comm& running() { return find_running(); }
void set_running(std::function<Comm&()> find) { find_running = std::move(find); }

Comm::Comm(Node& node, int rank)
    : node_(node),
      rank_(rank),
      slot_bytes_(node.layout.staging_bytes / 2 / kStagingSlots / kLine * kLine),
      sequence_(node.layout.first_epoch) {}

void Comm::begin(const Operation& operation, const void* input, void* output, void (*)(),
                 Preflight preflight) {
  waits_ = 0;
  called_ = operation;
  begin_phase(operation, input, output, preflight);
}

void Comm::begin_phase(const Operation& operation, const void* input, void* output,
                       Preflight preflight) {
  sequence_ = next_sequence(sequence_);
  ++phase_;
  operation_ = operation;
  preflight_ = preflight;
  unit_ = {size_of(operation.dtype)};
  input_ = static_cast<std::byte*>(const_cast<void*>(input));
  output_ = static_cast<std::byte*>(output);
  zero_copy_ = exposed_ = false;
  leave_peers_heaps();
  for (int channel = 0; channel < kChannels; ++channel)
    started_[channel] = member(rank_).signals[channel].size();
  check_aborted();
}

// Like the CPU's: a satisfied wait does not check for failures.
template <class Condition>
void Comm::await(int r, Condition has_come, const std::string& what) {
  count_wait();
  const Member& other = member(r);
  node_.fibers.wait_until([&] { return has_come() || node_.abort.value != 0 || other.dead; },
                          [&] { return me().when(me().now()) + " waits " + what; });
  if (!has_come()) throw Stopped();
}

void Comm::publish() {
  const auto in_window = [&](std::byte* tensor) {
    return tensor != nullptr && node_.memory.shared(tensor) ? tensor : nullptr;
  };
  Member& mine = member(rank_);
  std::byte* const input = in_window(input_);
  std::byte* const output = in_window(output_);
  exposed_ = input != nullptr || output != nullptr;
  write({mine.announcements[sequence_ & 1u], rank_}, {{1, 0, sequence_}}, kAnnouncement);
  mine.announced.push_back({operation_, input, output, preflight_, me().release()});
}

void Comm::await_announcements() {
  zero_copy_ = allows_zero_copy(operation_);
  for (int r = 0; r < size(); ++r) {
    Member& other = member(r);
    if (r != rank_) {
      await(
          r, [&] { return other.announced.size() > phase_; },
          "for the announcement of " + other.thread->name);
      me().clock.join(announced(r).clock);
      const Pieces found = read({other.announcements[sequence_ & 1u], r}, 1, kAnnouncement);
      if (found[0].element != sequence_)
        throw Violation("the announcement is of another operation");
    }
    zero_copy_ = zero_copy_ && (announced(r).input != nullptr || !shares_input(operation_, r)) &&
                 (announced(r).output != nullptr || !shares_output(operation_, r));
  }
  if (!zero_copy_) return;
  store(member(rank_).in_peers_heaps, 1);
  check_aborted();
}

Preflight Comm::preflight() const {
  Preflight all = announced(0).preflight;
  for (int r = 1; r < size(); ++r) all = all | announced(r).preflight;
  return all;
}

void Comm::put_packets(Location from) {
  for (int i = 1; i < size(); ++i) {
    const int r = (rank_ + i) % size();
    node_.fibers.pause();  // no clock shows their arrival
    write({packets(r, rank_), r}, read(from, count(), unit_), unit_);
    member(r).put[static_cast<std::size_t>(rank_)][sequence_ & 1u] = sequence_;
  }
}

void Comm::take_packets() {
  for (int i = 1; i < size() && count() > 0; ++i) {
    const int r = (rank_ + i) % size();
    const auto& put = member(rank_).put[static_cast<std::size_t>(r)];
    await(
        r, [&] { return put[sequence_ & 1u] == sequence_; },
        "for the packets of " + member(r).thread->name);
    write(taken(r), node_.memory.take(me(), *member(r).thread, packets(rank_, r), count(), unit_),
          unit_);
  }
}

Location Comm::taken(int r) const {
  return {member(rank_).taken + r * node_.layout.packet_bytes, rank_};
}

void Comm::signal(int channel) { member(rank_).signals[channel].push_back(me().release()); }

void Comm::wait(int r, int channel, std::int64_t step) {
  if (step <= 0) return;
  const std::vector<Clock>& signals = member(r).signals[channel];
  const std::size_t target = started_[channel] + static_cast<std::size_t>(step);
  // The count as stored in a flag.
  const auto epoch = [&](std::size_t count) {
    return node_.layout.first_epoch + static_cast<std::uint32_t>(count);
  };
  await(
      r, [&] { return reached(epoch(signals.size()), epoch(target)); },
      "for step " + std::to_string(step) + " of channel " + std::to_string(channel) + " of " +
          member(r).thread->name);
  if (signals.size() < target) throw Violation(me().when(me().now()) + " waits too little");
  me().clock.join(signals[target - 1]);
}

void Comm::wait_all(int channel, std::int64_t step) {
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) wait(r, channel, step);
  }
}

void Comm::copy(Location to, Location from, std::int64_t n) {
  if (n == 0 || to.data == from.data) return;
  check_apart(to, from, n);
  write(to, read(from, n, unit_), unit_);
}

void Comm::add(const std::vector<Location>& to, const std::vector<Location>& from, std::int64_t n,
               bool last) {
  if (n == 0) return;
  std::vector<Pieces> terms;
  for (const Location& location : from) terms.push_back(read(location, n, unit_));
  const Pieces result = sum(terms, last);
  for (std::size_t i = 0; i < to.size(); ++i) {
    for (const Location& location : from) check_apart(to[i], location, n);
    for (std::size_t j = 0; j < i; ++j) check_apart(to[i], to[j], n);
    write(to[i], result, unit_);
  }
}

// A result may replace an operand only at exactly the same place.
void Comm::check_apart(Location a, Location b, std::int64_t n) const {
  const std::int64_t distance = a.data - b.data;
  if (distance != 0 && std::abs(distance) < n * unit_.bytes) {
    throw Violation(me().when(me().now()) + " writes over what it still reads");
  }
}

Pieces Comm::read(Location from, std::int64_t units, Unit unit) {
  if (units > 0 && node_.memory.owner(from.data) != member(from.rank).thread->index) {
    throw Violation(me().when(me().now()) + " reads beyond the memory of " +
                    member(from.rank).thread->name);
  }
  return node_.memory.read(me(), from.data, units, unit);
}

void Comm::write(Location to, const Pieces& pieces, Unit unit) {
  if (!pieces.empty() && node_.memory.owner(to.data) != member(to.rank).thread->index) {
    throw Violation(me().when(me().now()) + " writes beyond the memory of " +
                    member(to.rank).thread->name);
  }
  node_.memory.write(me(), to.data, pieces, unit);
}

Pieces Comm::sum(const std::vector<Pieces>& terms, bool last, Unit unit) {
  Pieces result;
  zip(terms, {unit.bytes}, [&](std::int64_t units, const std::vector<Piece>& pieces) {
    std::vector<Symbol> symbols;
    for (const Piece& piece : pieces) {
      if (piece.element != pieces[0].element) {
        throw Violation(me().when(me().now()) + " adds element " + std::to_string(piece.element) +
                        " to element " + std::to_string(pieces[0].element));
      }
      symbols.push_back(piece.symbol);
    }
    result.push_back({units, node_.symbols.sum(symbols, last), pieces[0].element});
  });
  return result;
}

std::array<std::size_t, kChannels> Comm::signalled() const {
  std::array<std::size_t, kChannels> counts;
  for (int channel = 0; channel < kChannels; ++channel) {
    counts[static_cast<std::size_t>(channel)] = member(rank_).signals[channel].size();
  }
  return counts;
}

bool Comm::anyone_signalled(int channel) const {
  return std::any_of(node_.members.begin(), node_.members.end(), [&](const Member& member) {
    return member.signals[channel].size() > started_[channel];
  });
}

int Comm::load(Word& word) {
  node_.fibers.pause();
  me().clock.join(word.clock);
  return word.value;
}

void Comm::store(Word& word, int value) {
  node_.fibers.pause();
  me().clock.join(word.clock);
  word = {value, me().release()};
}

void Comm::check_aborted() {
  if (load(node_.abort) != 0) throw Stopped();
}

void Comm::finish() {
  check_aborted();
  leave_peers_heaps();
}

void Comm::leave_peers_heaps() {
  Word& word = member(rank_).in_peers_heaps;
  if (word.value != 0) store(word, 0);
}

void Comm::retreat() {
  leave_peers_heaps();
  if (!exposed_) return;
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    Member& other = member(r);
    node_.fibers.wait_until([&] { return other.in_peers_heaps.value == 0 || other.dead; },
                            [&] { return me().when(me().now()) + " retreats"; });
    me().clock.join(other.dead ? other.thread->clock : other.in_peers_heaps.clock);
  }
}

}  // namespace pycomm::checker

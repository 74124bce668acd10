// How a failed operation ends: all ranks raise the same reason, and no rank uses another one's
// memory any more.
#include <algorithm>
#include <system_error>
#include <thread>

#include "cpu/executor/comm.h"
#include "cpu/executor/waiting.h"
#include "cpu/executor/waiting_time.h"
#include "cpu/observe/window_reader.h"

namespace pycomm::cpu {
namespace {

// The time that the ranks of several nodes may take to decide whom to blame (Link::stop).
constexpr auto kDecidedWithin = std::chrono::seconds(3);

}  // namespace

void Comm::abort(std::uint64_t word) {
  std::uint64_t none = 0;
  window_->control(0).abort.compare_exchange_strong(none, word);
  wake(true);
}

void Comm::blame_number(int number, const std::string& what) {
  const std::uint64_t word = abort_word(Reason::malformed, number);
  abort(word);
  if (aborted() != word) check_aborted();
  throw malformed(number, peers_->pid_of(number), called_, ordinal(), what);
}

// The smallest word of the first reason and of all deaths seen by then, because a rank that nobody
// waits for may have died, too.
std::uint64_t Comm::last_word() {
  std::uint64_t word = aborted();
  for (int r = 0; r < size_; ++r) {
    if (!left(r) && ended(r)) word = std::min(word, abort_word(Reason::peer_died, number(r)));
  }
  std::uint64_t none = 0;
  window_->control(0).last_word.compare_exchange_strong(none, word);
  return window_->control(0).last_word.load();
}

void Comm::decide_culprit(std::uint64_t word) {
  std::uint64_t none = 0;
  window_->control(0).decided_word.compare_exchange_strong(none, word);
}

std::uint64_t Comm::decided_word() {
  if (!spans()) return aborted();
  const std::atomic<std::uint64_t>& word = window_->control(0).decided_word;
  for (WaitingTime waited; word.load() == 0;) {
    if (waited.until(Clock::now()) > kDecidedWithin || !has_carrier()) decide_culprit(last_word());
    std::this_thread::sleep_for(kNap);
  }
  return word.load();
}

int Comm::unresponsive() const {
  const std::uint64_t word = spans() ? window_->control(0).decided_word.load() : aborted();
  if (!is_abort_word(word, peers_->count())) return -1;
  const bool late = reason_of(word) == Reason::timeout && rank_of(word) != waiter_of(word);
  return late || reason_of(word) == Reason::returned ? rank_of(word) : -1;
}

// True if a live rank of this node can hear the other nodes' reasons.
bool Comm::has_carrier() const {
  for (int r = 0; r < stripes_; ++r) {
    if (!ended(r)) return true;
  }
  return false;
}

// What the culprit is waiting for in another group, if it is on this node.
std::string Comm::what_keeps(int culprit) const {
  const int r = index_of(culprit);
  return r < 0 ? std::string() : membership_.describe(r);
}

CollectiveError Comm::failure_of(std::uint64_t word) const {
  if (!is_abort_word(word, peers_->count())) return overwritten(called_, ordinal());
  const int culprit = rank_of(word), pid = peers_->pid_of(culprit);
  if (const std::string both = disagreement(word); !both.empty()) {
    return pycomm::ended(Reason::mismatch, culprit, pid, both, called_, ordinal());
  }
  if (reason_of(word) == Reason::mismatch && announced(0) == sequence_) {
    const Operation& first = announcement(0).operation;
    const auto told = [this](int r) {
      return details(r).sequence == sequence_ ? &details(r) : nullptr;
    };
    for (int r = 1; r < size_; ++r) {
      const Operation& other = announcement(r).operation;
      if (number(r) != culprit || announced(r) != sequence_ || other == first) continue;
      return mismatch(number(0), first, culprit, other, pid, ordinal(), told(0), told(r));
    }
  }
  if (reason_of(word) == Reason::timeout) {
    const CollectiveError error = timeout(word, culprit == number(rank_), pid, called_, ordinal());
    const std::string why = what_keeps(culprit);
    return why.empty() ? error : error.because(why);
  }
  return failure(reason_of(word), culprit, pid, called_, ordinal());
}

std::string Comm::disagreement(std::uint64_t word) const {
  if (reason_of(word) != Reason::mismatch || waiter_of(word) < 0) return {};
  const int receiver = index_of(waiter_of(word));
  if (receiver < 0) {
    return "rank " + std::to_string(rank_of(word)) + " sent another size or dtype than rank " +
           std::to_string(waiter_of(word)) + " expects";
  }
  return p2p::describe(window_->control(receiver).disagreement, rank_of(word), waiter_of(word));
}

GroupState Comm::state(std::size_t most, bool only_own) const {
  const TickScale scale = TickScale::now();
  GroupState group{scale.time(), size_, aborted() != 0, {}, {}, membership_.name()};
  if (other_nodes_ && !only_own) group.nodes = other_nodes_();
  for (int r = 0; r < size_; ++r) {
    if (only_own && r != rank_) continue;
    RankState rank = state_of(
        {window_->control(r), window_->records(r), window_->launches(r), window_->subjects(r)},
        size_, most, scale);
    rank.rank = number(r);
    rank.pid = pid(r);
    rank.gone = rank.gone || ended(r);
    if (rank.waits_for >= 0) rank.waits_for = number(rank.waits_for);
    rank.elsewhere = membership_.describe(r);
    group.ranks.push_back(std::move(rank));
  }
  return group;
}

std::string Comm::subject(std::uint32_t number) const {
  return subject_of(mine(), window_->subjects(rank_), number);
}

CollectiveError Comm::with_report(const CollectiveError& error) const {
  CollectiveError known = error.about(subject(recorder_.subject())).knowing(completed());
  known.group = report();
  return known;
}

std::shared_ptr<const GroupState> Comm::report() const {
  try {
    return std::make_shared<const GroupState>(state(kReported));
  } catch (const std::bad_alloc&) {  // the error matters more
    return nullptr;
  }
}

void Comm::retreat() {
  recorder_.enter(called_, ordinal());  // if the operation has failed before it was announced
  leave_peers_heaps();
  if (!exposed_) return;
  if (await_outside(&Control::in_peers_heaps, [this] { detach(); })) exposed_ = false;
}

bool Comm::await_outside(std::atomic<std::uint32_t> Control::* flag,
                         const std::function<void()>& detach) const {
  bool can_detach = true;
  WaitingTime waited;
  for (int r = 0; r < size_; ++r) {
    while (r != rank_ && (window_->control(r).*flag).load() != 0 && !ended(r)) {
      const Clock::duration time = waited.until(Clock::now());
      // A thread of this process cannot be locked out, and need not be: it will leave soon.
      if (can_detach && peers_->watched(r) && time > kRetreatWithin) {
        try {
          detach();
          return true;
        } catch (const std::system_error&) {
          can_detach = false;  // no memory for the pages: can only wait
        }
      }
      if (time > kRetreatWithin + timeout_) return false;
      std::this_thread::sleep_for(kNap);
    }
  }
  return true;
}

// Detaches the pages of this rank's tensors, each page once.
void Comm::detach() {
  const auto pages_of = [](std::int64_t offset, std::int64_t bytes) {
    if (offset == kNotInWindow) return Range{0, 0};
    const std::int64_t begin = offset / kPage * kPage;
    return Range{begin, round_up(offset + bytes, kPage) - begin};
  };
  const Range input = pages_of(met(rank_).input, input_bytes_);
  const Range output = pages_of(met(rank_).output, output_bytes_);
  const std::int64_t input_end = input.begin + input.count;
  const std::int64_t output_end = output.begin + output.count;
  if (input.begin < output_end && output.begin < input_end) {
    const std::int64_t begin = std::min(input.begin, output.begin);
    window_->detach(rank_, {begin, std::max(input_end, output_end) - begin});
  } else {
    if (input.count > 0) window_->detach(rank_, input);
    if (output.count > 0) window_->detach(rank_, output);
  }
}

}  // namespace pycomm::cpu

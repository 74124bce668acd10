#include "cpu/internode/link.h"

#include <algorithm>

#include "cpu/waiting_time.h"

namespace pycomm::cpu {
namespace {

constexpr auto kLook = std::chrono::milliseconds(20);
constexpr Clock::duration kNever = Clock::duration::max();
constexpr auto kWatchEvery = std::chrono::milliseconds(50);
// Longer than in shared memory: a machine whose own rank is late says so in time.
constexpr auto kGrace = std::chrono::milliseconds(500);
// For the other machines to say why they stop.
constexpr auto kFarewells = std::chrono::milliseconds(300);

}  // namespace

Link::Link(Comm& local, std::shared_ptr<Transport> transport, const Machines& machines,
           Clock::duration timeout)
    : local_(local),
      transport_(std::move(transport)),
      machines_(machines),
      timeout_(timeout),
      greetings_(static_cast<std::size_t>(machines.count())),
      greeted_operation_(local.ordinal()),
      areas_(static_cast<std::size_t>(machines.count())) {
  transport_->listen(
      [this](int machine, std::span<const std::byte> farewell) { hear(machine, farewell); });
  try {
    watcher_ = std::thread([this] { watch(); });
  } catch (...) {
    transport_->listen({});  // nobody will be here to hear
    throw;
  }
}

Link::~Link() {
  leave();
  watcher_.join();
  transport_->listen({});
}

// A farewell that cannot be read is a reason to stop, like any other.
void Link::hear(int machine, std::span<const std::byte> farewell) {
  std::uint64_t word = abort_word(Reason::malformed, number(machine));
  try {
    word = parse_farewell(farewell, sender(machine), contributors()).abort_word;
  } catch (const std::invalid_argument&) {
  }
  {
    const std::lock_guard lock(heard_mutex_);
    heard_[machine] = word;
  }
  if (word != 0) local_.abort(word);
}

// This rank may be busy with something else while those beside it wait in the next operation. No
// machine can have completed that without this one's greeting, so one that is lost has died.
void Link::look_before_greeting(Clock::duration waited, Clock::duration& lost_since) {
  const int lost = find_lost(true);
  lost_since = lost < 0 ? kNever : std::min(lost_since, waited);
  if (lost < 0 || waited - lost_since <= kGrace) return;
  if (!local_.anyone_waits_after(greeted_operation_)) return;
  local_.abort(abort_word(Reason::peer_died, number(lost)));
}

void Link::watch() {
  WaitingTime time;
  Clock::duration lost_since = kNever;
  std::unique_lock lock(left_mutex_);
  while (!left_changed_.wait_for(lock, kWatchEvery, [&] { return left_; })) {
    look_before_greeting(time.until(Clock::now()), lost_since);
    if (local_.aborted() != 0) {
      lock.unlock();
      return stop();
    }
  }
}

void Link::begin(void (*interrupt)()) {
  interrupt_ = interrupt;
  outlook_ = {};
  traffic_ = {};
}

void Link::begin_tensor(const Operation& operation, const void* input, void* output,
                        Outlook outlook) {
  operation_ = operation;
  input_ = static_cast<std::byte*>(const_cast<void*>(input));
  output_ = static_cast<std::byte*>(output);
  outlook_ = outlook;
}

void Link::publish() {
  Greeting& mine = greetings_[static_cast<std::size_t>(rank())];
  mine = {header_of(MessageKind::greeting, sender(rank())), local_.called(), local_.ordinal(),
          outlook_};
  Round round;
  for (int m = 0; m < size(); ++m) {
    if (m == rank()) continue;
    Greeting& theirs = greetings_[static_cast<std::size_t>(m)];
    theirs = {};  // a message that is too short is not completed by an earlier one
    round.sends.push_back({m, reinterpret_cast<std::byte*>(&mine), sizeof(Greeting)});
    round.receives.push_back({m, reinterpret_cast<std::byte*>(&theirs), sizeof(Greeting)});
  }
  greeted_ = post(round);
  greeted_operation_ = local_.ordinal();
}

void Link::meet() {
  wait(greeted_);
  for (int m = 0; m < size(); ++m) {
    Greeting& greeting = greetings_[static_cast<std::size_t>(m)];
    try {
      greeting = parse_greeting(std::as_bytes(std::span(&greeting, 1)), sender(m));
    } catch (const std::invalid_argument& error) {
      blame(m, error.what());
    }
  }
  outlook_ = greetings_[0].outlook;
  const Greeting& first = greetings_[0];
  for (int m = 1; m < size(); ++m) {
    const Greeting& other = greetings_[static_cast<std::size_t>(m)];
    outlook_ = outlook_ | other.outlook;
    if (other.operation == first.operation && other.sequence == first.sequence) continue;
    local_.abort(abort_word(Reason::mismatch, number(m)));
    throw mismatch(number(0), first.operation, number(m), other.operation, local_.pid_of(number(m)),
                   local_.ordinal());
  }
}

std::int64_t Link::post(const Round& round) {
  local_.check_aborted();
  for (const Parcel& parcel : round.sends) traffic_.sent += parcel.bytes;
  for (const Parcel& parcel : round.receives) traffic_.received += parcel.bytes;
  transport_->post(round);
  return ++posted_;
}

// For each round anew: a slow link makes progress.
void Link::wait(std::int64_t round) {
  for (; waited_ < round; ++waited_) {
    WaitingTime waited;
    Clock::duration lost_since = kNever;
    while (!transport_->wait(waited_ + 1, kLook)) {
      local_.beat();
      look_for_failure(waited_ + 1 == greeted_, waited.until(Clock::now()), lost_since);
      if (interrupt_ != nullptr) interrupt_();
    }
  }
}

void Link::look_for_failure(bool greeting, Clock::duration waited, Clock::duration& lost_since) {
  local_.check_aborted();
  const int lost = find_lost(greeting);
  lost_since = lost < 0 ? kNever : std::min(lost_since, waited);
  // What it has sent before may still be on its way through this process.
  if (lost >= 0 && waited - lost_since > kGrace) {
    local_.abort(abort_word(Reason::peer_died, number(lost)));
  } else if (waited > timeout_ + kGrace) {
    local_.abort(timeout_word(number(awaited()), local_.number(local_.rank()),
                              std::chrono::duration<double>(waited).count()));
  }
  local_.check_aborted();
}

// A machine from which something is still to come, and nothing will. Before the greetings are there,
// that is any: one that is through with the operation has met all others, so that the greetings that
// are missing here are on their way.
int Link::find_lost(bool greeting) const {
  for (int m = 0; m < size(); ++m) {
    if (m != rank() && (greeting || m == awaited()) && transport_->lost(m)) return m;
  }
  return -1;
}

// Where it is not known yet which one, all of them are waited for.
int Link::awaited() const {
  const int machine = transport_->awaited();
  return machine >= 0 ? machine : (rank() + 1) % size();
}

void Link::stop() {
  const std::lock_guard lock(stop_mutex_);
  if (stopped_ || local_.aborted() == 0) return;
  stopped_ = true;
  tell();
  transport_->wait_for_farewells(size() - 1, kFarewells);
  local_.settle(least_word());
  transport_->disconnect();
}

// Every machine tells every other its last word, and all take the least. If one is lost without a
// word, the rank at the other end of this link has died, unless somebody blames a rank beside it.
std::uint64_t Link::least_word() {
  const std::lock_guard lock(heard_mutex_);
  std::vector<std::uint64_t> words{local_.last_word()};
  for (const auto& [machine, word] : heard_) {
    if (word != 0) words.push_back(word);
  }
  std::uint64_t least = *std::min_element(words.begin(), words.end());
  for (int m = 0; m < size(); ++m) {
    if (m == rank() || heard_.contains(m) || !transport_->lost(m)) continue;
    const auto blames_it = [&](std::uint64_t word) {
      const std::vector<int>& ranks = machines_.at(m);
      return reason_of(word) == Reason::peer_died &&
             std::find(ranks.begin(), ranks.end(), rank_of(word)) != ranks.end();
    };
    if (std::any_of(words.begin(), words.end(), blames_it)) continue;
    least = std::min(least, abort_word(Reason::peer_died, number(m)));
  }
  return least;
}

void Link::tell() {
  if (local_.aborted() == 0) return;
  const std::uint64_t word = local_.last_word();
  const Farewell farewell{header_of(MessageKind::farewell, sender(rank())), word};
  transport_->stop(std::as_bytes(std::span(&farewell, 1)));
}

void Link::leave() {
  {
    const std::lock_guard lock(left_mutex_);
    if (left_) return;
    left_ = true;
    left_changed_.notify_all();
  }
  tell();  // the others must not take an abort for a farewell
  const Farewell farewell{header_of(MessageKind::farewell, sender(rank())), 0};
  transport_->leave(std::as_bytes(std::span(&farewell, 1)));
}

}  // namespace pycomm::cpu

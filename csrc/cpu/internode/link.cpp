#include "cpu/internode/link.h"

#include <algorithm>
#include <cstring>

#include "cpu/executor/threads.h"
#include "cpu/executor/waiting_time.h"

namespace pycomm::cpu {
namespace {

constexpr Clock::duration kNever = Clock::duration::max();
constexpr auto kWatchEvery = std::chrono::milliseconds(50);
// Longer than in shared memory, so that a node with a late rank can report it first.
constexpr auto kGrace = std::chrono::milliseconds(500);
// How much longer to wait for a node that may itself wait for another one.
constexpr auto kGracePerHop = std::chrono::milliseconds(50);
// So that nodes whose carriers die at the same time see both deaths, and blame the same rank.
constexpr auto kGraceForOtherDeaths = std::chrono::milliseconds(100);
// How long to wait for the other nodes' farewells; for nodes that nobody blames, longer: they live,
// and this node would look dead to them if it disconnected before they have heard from it.
constexpr auto kFarewells = std::chrono::milliseconds(300);
constexpr auto kFarewellsOfBlameless = std::chrono::seconds(2);

}  // namespace

Link::Link(Comm& local, std::shared_ptr<Transport> transport, const Nodes& nodes,
           Clock::duration timeout)
    : local_(local),
      transport_(std::move(transport)),
      nodes_(nodes),
      timeout_(timeout),
      handshakes_(static_cast<std::size_t>(nodes.count())),
      handshake_operation_(local.ordinal()),
      areas_(static_cast<std::size_t>(nodes.count())) {
  transport_->listen(
      [this](int node, std::span<const std::byte> farewell) { hear(node, farewell); });
  try {
    watcher_ = start_thread([this] { watch(); });
  } catch (...) {
    transport_->listen({});  // this object will not exist
    throw;
  }
}

Link::~Link() {
  leave();
  watcher_.join();
  transport_->listen({});
}

// A farewell that cannot be parsed is a reason to stop, like any other.
void Link::hear(int node, std::span<const std::byte> farewell) {
  std::uint64_t word = abort_word(Reason::malformed, number(node));
  try {
    word = parse_farewell(farewell, sender(node), contributors()).abort_word;
  } catch (const std::invalid_argument&) {
  }
  {
    const std::lock_guard lock(heard_mutex_);
    heard_[node] = word;
  }
  if (word != 0) local_.abort(word);
}

// Looks for lost nodes between this rank's operations: it may be busy with something else while
// other ranks of its node already wait in the next operation. No node can have completed that
// operation without this one's handshake, so a node that is lost has died.
void Link::look_before_handshake(Clock::duration waited, Clock::duration& lost_since) {
  const int lost = find_lost(true);
  lost_since = lost < 0 ? kNever : std::min(lost_since, waited);
  if (lost < 0 || waited - lost_since <= kGrace) return;
  if (!local_.anyone_waits_after(handshake_operation_)) return;
  local_.abort(abort_word(Reason::peer_died, number(lost)));
}

void Link::watch() {
  WaitingTime time;
  Clock::duration lost_since = kNever;
  std::unique_lock lock(left_mutex_);
  while (!left_changed_.wait_for(lock, kWatchEvery, [&] { return left_; })) {
    look_before_handshake(time.until(Clock::now()), lost_since);
    if (local_.aborted() != 0) {
      lock.unlock();
      return stop();
    }
  }
}

void Link::begin(void (*interrupt)()) {
  interrupt_ = interrupt;
  preflight_ = {};
  traffic_ = {};
}

void Link::begin_tensor(const Operation& operation, const void* input, void* output,
                        Preflight preflight) {
  operation_ = operation;
  input_ = static_cast<std::byte*>(const_cast<void*>(input));
  output_ = static_cast<std::byte*>(output);
  preflight_ = preflight;
}

void Link::publish(bool to_all) {
  Handshake& mine = handshakes_[static_cast<std::size_t>(rank())];
  mine = {header_of(MessageKind::handshake, sender(rank())), local_.called(), local_.ordinal(),
          preflight_};
  const int before = (rank() - 1 + size()) % size(), next = (rank() + 1) % size();
  Batch batch;
  announced_.clear();
  for (int m = 0; m < size(); ++m) {
    if (to_all || m == rank() || m == next) announced_.push_back(m);
    if (m == rank()) continue;
    Handshake& theirs = handshakes_[static_cast<std::size_t>(m)];
    theirs = {};  // so that an earlier message cannot complete a short one
    if (to_all || m == before) {
      batch.sends.push_back({m, reinterpret_cast<std::byte*>(&mine), sizeof(Handshake)});
    }
    if (to_all || m == next) {
      batch.receives.push_back({m, reinterpret_cast<std::byte*>(&theirs), sizeof(Handshake)});
    }
  }
  handshake_batch_ = post(batch);
  handshake_operation_ = local_.ordinal();
}

void Link::write_handshake(std::byte* to) const {
  std::memcpy(to, &handshakes_[static_cast<std::size_t>(rank())], sizeof(Handshake));
}

void Link::read_handshake(int node, const std::byte* from) {
  std::memcpy(&handshakes_[static_cast<std::size_t>(node)], from, sizeof(Handshake));
  if (node == 0) announced_.clear();
  announced_.push_back(node);
}

void Link::check_announcements() {
  for (const int m : announced_) {
    Handshake& handshake = handshakes_[static_cast<std::size_t>(m)];
    try {
      handshake = parse_handshake(std::as_bytes(std::span(&handshake, 1)), sender(m));
    } catch (const std::invalid_argument& error) {
      blame(m, error.what());
    }
  }
  const int least = announced_.front();
  const Handshake& first = handshakes_[static_cast<std::size_t>(least)];
  preflight_ = first.preflight;
  for (const int m : announced_) {
    const Handshake& other = handshakes_[static_cast<std::size_t>(m)];
    preflight_ = preflight_ | other.preflight;
    if (other.operation == first.operation && other.sequence == first.sequence) continue;
    local_.abort(abort_word(Reason::mismatch, number(m)));
    throw mismatch(number(least), first.operation, number(m), other.operation,
                   local_.pid_of(number(m)), local_.ordinal());
  }
}

std::int64_t Link::post(const Batch& batch) {
  local_.check_aborted();
  for (const Transfer& transfer : batch.sends) traffic_.sent += transfer.bytes;
  for (const Transfer& transfer : batch.receives) traffic_.received += transfer.bytes;
  transport_->post(batch);
  return ++posted_;
}

// The timeout starts anew for each batch, because a slow link makes progress.
void Link::wait(std::int64_t batch, int hops) {
  for (; waited_ < batch; ++waited_) {
    WaitingTime waited;
    Clock::duration lost_since = kNever;
    while (!transport_->wait(waited_ + 1, kLook)) {
      local_.beat();
      waits_for_ = transport_->awaited();
      look_for_failure(waited_ + 1, hops, waited.until(Clock::now()), lost_since);
      if (interrupt_ != nullptr) interrupt_();
    }
    if (waited_ + 1 == handshake_batch_) check_announcements();
  }
  waits_for_ = -1;
}

void Link::look_for_failure(std::int64_t batch, int hops, Clock::duration waited,
                            Clock::duration& lost_since) {
  local_.check_aborted();
  const int lost = find_lost(batch == handshake_batch_);
  lost_since = lost < 0 ? kNever : std::min(lost_since, waited);
  // What the node sent before it was lost may still be on its way through this process.
  const auto grace = lost >= 0 && transport_->died(lost) ? kGraceForOtherDeaths : kGrace;
  if (lost >= 0 && waited - lost_since > grace) {
    local_.abort(abort_word(Reason::peer_died, number(lost)));
  } else if (waited > timeout_ + kGrace + hops * kGracePerHop) {
    local_.abort(timeout_word(number(awaited()), local_.number(local_.rank()),
                              std::chrono::duration<double>(waited).count()));
  }
  local_.check_aborted();
}

// Returns a node that is lost although something from it is missing, or -1. Before the handshakes
// have arrived, that is any lost node. If it left because it has completed the operation, it has the
// handshakes of all nodes, so those that are missing here are on their way and arrive in time.
int Link::find_lost(bool handshake) const {
  for (int m = 0; m < size(); ++m) {
    if (m != rank() && (handshake || m == awaited()) && transport_->lost(m)) return m;
  }
  return -1;
}

// The node that the oldest batch waits for. If that is not known yet, the next node stands for all
// of them.
int Link::awaited() const {
  const int node = transport_->awaited();
  return node >= 0 ? node : (rank() + 1) % size();
}

void Link::stop() {
  const std::lock_guard lock(stop_mutex_);
  if (stopped_ || local_.aborted() == 0) return;
  stopped_ = true;
  tell();
  transport_->wait_for_farewells(others(), kFarewells);
  transport_->wait_for_farewells(blameless(), kFarewellsOfBlameless);
  local_.decide_culprit(least_word());
  {
    const std::lock_guard lock(heard_mutex_);
    std::set<int>& lost = lost_.emplace();
    for (int m = 0; m < size(); ++m) {
      if (m != rank() && transport_->lost(m)) lost.insert(m);
    }
  }
  transport_->disconnect();
}

std::set<int> Link::others() const {
  std::set<int> found;
  for (int m = 0; m < size(); ++m) {
    if (m != rank()) found.insert(m);
  }
  return found;
}

// The other nodes without those that a farewell or this node's word blames.
std::set<int> Link::blameless() {
  std::set<int> found = others();
  const std::lock_guard lock(heard_mutex_);
  found.erase(nodes_.node_of(rank_of(local_.last_word())));
  for (const auto& [node, word] : heard_) {
    if (word != 0) found.erase(nodes_.node_of(rank_of(word)));
  }
  return found;
}

void Link::describe(NodeState& state) {
  const int node = state.node;
  state.peer = number(node);
  state.awaited = waits_for_ == node;
  const std::lock_guard lock(heard_mutex_);
  const auto farewell = heard_.find(node);
  if (farewell == heard_.end()) {
    state.lost = lost_ ? lost_->contains(node) : transport_->lost(node);
    return;
  }
  const std::uint64_t word = farewell->second;
  const int culprit = word == 0 ? -1 : rank_of(word);
  state.told = word == 0 ? "it has left"
               : reason_of(word) == Reason::timeout
                   ? timeout_text(word, false, local_.pid_of(culprit))
                   : failure_text(reason_of(word), culprit, local_.pid_of(culprit));
}

// Every node sends its last word to every other node, and all take the smallest. If a node is lost
// without a word, the rank at the other end of this link counts as dead, unless another word blames
// a rank of that node.
std::uint64_t Link::least_word() {
  const std::lock_guard lock(heard_mutex_);
  std::vector<std::uint64_t> words{local_.last_word()};
  for (const auto& [node, word] : heard_) {
    if (word != 0) words.push_back(word);
  }
  std::uint64_t least = *std::min_element(words.begin(), words.end());
  for (int m = 0; m < size(); ++m) {
    if (m == rank() || heard_.contains(m) || !transport_->lost(m)) continue;
    const auto blames_it = [&](std::uint64_t word) {
      const std::vector<int>& ranks = nodes_.at(m);
      return reason_of(word) == Reason::peer_died &&
             std::find(ranks.begin(), ranks.end(), rank_of(word)) != ranks.end();
    };
    if (std::any_of(words.begin(), words.end(), blames_it)) continue;
    least = std::min(least, abort_word(Reason::peer_died, number(m)));
  }
  return least;
}

void Link::tell() {
  if (local_.aborted() != 0) tell(local_.last_word());
}

void Link::tell(std::uint64_t word) {
  const Farewell farewell{header_of(MessageKind::farewell, sender(rank())), word};
  transport_->stop(std::as_bytes(std::span(&farewell, 1)));
}

// Reads the window with the lock, so that no other thread leaves it and frees it meanwhile.
void Link::leave() {
  std::uint64_t word = 0;
  {
    const std::lock_guard lock(left_mutex_);
    if (left_) return;
    if (local_.aborted() != 0) word = local_.last_word();
    left_ = true;
    left_changed_.notify_all();
  }
  if (word != 0) tell(word);  // first, so that an abort is not taken for a normal farewell
  const Farewell farewell{header_of(MessageKind::farewell, sender(rank())), 0};
  transport_->leave(std::as_bytes(std::span(&farewell, 1)));
}

}  // namespace pycomm::cpu

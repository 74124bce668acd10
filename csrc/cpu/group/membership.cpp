#include "cpu/group/membership.h"

#include <pthread.h>

#include <algorithm>
#include <vector>

#include "core/errors.h"

namespace pycomm::cpu {
namespace {

// All memberships of this process. A forked child has none of its parent's. Never destroyed,
// because a worker may still wait while the process ends.
std::mutex mutex;
auto& memberships = *new std::vector<Membership*>;

[[maybe_unused]] const int memberships_follow_forks =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                   [] {
                     memberships.clear();
                     mutex.unlock();
                   });

// If the other ranks on the node are not watched, all ranks are threads of this process.
int thread_of(const Liveness& peers, int rank, int size) {
  return size > 1 && !peers.watched(rank == 0 ? 1 : 0) ? peers.number(rank) : -1;
}

}  // namespace

Membership::Membership(std::shared_ptr<Window> window, std::shared_ptr<const Liveness> peers,
                       int rank, int size)
    : window_(std::move(window)),
      peers_(std::move(peers)),
      rank_(rank),
      size_(size),
      thread_(thread_of(*peers_, rank, size)) {
  const std::lock_guard lock(mutex);
  memberships.push_back(this);
}

Membership::~Membership() { leave(); }

void Membership::leave() {
  const std::lock_guard lock(mutex);
  std::erase(memberships, this);
}

void Membership::set_name(std::string name) {
  const std::lock_guard lock(mutex);
  name_ = std::move(name);
}

std::string Membership::name() const {
  const std::lock_guard lock(mutex);
  return name_;
}

void Membership::tell(int r, Collective collective, std::uint32_t ordinal) {
  Wait wait{peers_->number(r), peers_->pid(r), collective, ordinal, window_->id(), false, 0};
  const std::lock_guard lock(mutex);
  for (const Membership* const other : memberships) {
    if (other == this || !is_same_rank(*other)) continue;
    const std::optional<Wait> before = other->mine().shared_wait.read();
    if (before && !before->failed && before->group != wait.group) continue;
    wait.completed = other->mine().completed;
    other->mine().shared_wait.write(wait);
  }
}

void Membership::end(bool failed) {
  const std::lock_guard lock(mutex);
  for (const Membership* const other : memberships) {
    if (other == this || !is_same_rank(*other)) continue;
    SharedWait& place = other->mine().shared_wait;
    std::optional<Wait> told = place.read();
    if (!told || told->group != window_->id()) continue;
    told->failed = true;
    failed ? place.write(*told) : place.clear();
  }
}

// True if a rank of another group is one that waits in this group.
bool Membership::waits_here(int number, int pid) const {
  for (int r = 0; r < size_; ++r) {
    const bool same = thread_ < 0 ? peers_->pid(r) == pid : peers_->number(r) == number;
    if (same && window_->control(r).waiting.load() != 0) return true;
  }
  return false;
}

std::string Membership::describe(int r) const {
  const Control& theirs = window_->control(r);
  const std::optional<Wait> wait = theirs.shared_wait.read();
  if (!wait || wait->completed != theirs.completed) return {};
  const std::lock_guard lock(mutex);
  const auto found = std::find_if(memberships.begin(), memberships.end(), [&](const auto* other) {
    return other->window_->id() == wait->group && is_same_rank(*other);
  });
  const bool shared = found != memberships.end() && !(*found)->name_.empty();
  const std::string group = shared ? "group '" + (*found)->name_ + "'" : "another group";
  std::string text = "rank " + std::to_string(peers_->number(r)) +
                     (wait->failed ? " has failed to meet " : " waits for ") +
                     describe_rank(wait->rank, wait->pid) + " of " + group + " in " +
                     name_of(wait->collective) + ", operation " + std::to_string(wait->ordinal) +
                     " of that group";
  if (waits_here(wait->rank, wait->pid)) {
    text += "; the ranks seem to call the collectives of that group and of this one" +
            (name_.empty() ? "" : ", '" + name_ + "',") + " in different orders";
  }
  return text;
}

}  // namespace pycomm::cpu

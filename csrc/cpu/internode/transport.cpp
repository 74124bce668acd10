#include "cpu/internode/transport.h"

#include <algorithm>
#include <cstring>

#include "cpu/executor/waiting_time.h"

namespace pycomm::cpu {

bool Transport::wait(std::int64_t batches, Clock::duration patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return completed_ >= batches; });
}

bool Transport::lost(int node) const {
  const std::lock_guard lock(mutex_);
  return lost_.contains(node);
}

bool Transport::died(int node) const {
  {
    const std::lock_guard lock(mutex_);
    if (failed_ != node || !ended_.contains(node)) return false;
  }
  const std::lock_guard lock(listener_mutex_);
  return !farewells_.contains(node);
}

void Transport::complete() {
  const std::lock_guard lock(mutex_);
  ++completed_;
  changed_.notify_all();
}

void Transport::lose(int node) {
  const std::lock_guard lock(mutex_);
  lost_.insert(node);
}

void Transport::fail(int node) {
  const std::lock_guard lock(mutex_);
  lost_.insert(node);
  failed_ = node;
}

void Transport::finished(int node) {
  const std::lock_guard lock(mutex_);
  ended_.insert(node);
  changed_.notify_all();
}

void Transport::heard(int node, std::span<const std::byte> farewell) {
  {
    const std::lock_guard lock(listener_mutex_);
    // A node's first farewell is its only one.
    if (!farewells_.try_emplace(node, farewell.begin(), farewell.end()).second) return;
    if (listener_) listener_(node, farewell);
  }
  finished(node);
}

void Transport::wait_for_farewells(const std::set<int>& nodes, Clock::duration patience) {
  std::unique_lock lock(mutex_);
  const auto all_ended = [&] { return std::ranges::includes(ended_, nodes); };
  for (WaitingTime waited; !changed_.wait_for(lock, kLook, all_ended);) {
    if (waited.until(Clock::now()) > patience) return;
  }
}

void Transport::listen(Listener listener) {
  const std::lock_guard lock(listener_mutex_);
  listener_ = std::move(listener);
  if (!listener_) return;
  for (const auto& [node, farewell] : farewells_) listener_(node, farewell);
}

std::vector<std::shared_ptr<LocalTransport>> LocalTransport::make(int nodes) {
  const auto shared = std::make_shared<Shared>();
  std::vector<std::shared_ptr<LocalTransport>> ends;
  for (int node = 0; node < nodes; ++node) {
    ends.emplace_back(new LocalTransport(shared, node));
    shared->ends.push_back(ends.back());
  }
  return ends;
}

void LocalTransport::post(const Batch& batch) {
  const std::lock_guard lock(shared_->mutex);
  const std::int64_t number = first_ + static_cast<std::int64_t>(missing_.size());
  if (!connected_) return missing_.push_back(1);  // it will never complete
  missing_.push_back(static_cast<std::int64_t>(batch.sends.size() + batch.receives.size()) + 1);
  for (const Transfer& transfer : batch.sends) {
    const Way way{node_, transfer.node, transfer.bytes};
    if (match(shared_->receives[way], transfer, true)) {
      finish(number);
    } else {
      shared_->sends[way].push_back({transfer, number});
    }
  }
  for (const Transfer& transfer : batch.receives) {
    const Way way{transfer.node, node_, transfer.bytes};
    if (match(shared_->sends[way], transfer, false)) {
      finish(number);
    } else {
      shared_->receives[way].push_back({transfer, number});
    }
  }
  finish(number);
}

// If the counterpart of a transfer is waiting, completes both and returns true.
bool LocalTransport::match(std::deque<Waiting>& others, const Transfer& transfer, bool sending) {
  if (others.empty()) return false;
  const Waiting other = others.front();
  others.pop_front();
  std::memcpy(sending ? other.transfer.data : transfer.data,
              sending ? transfer.data : other.transfer.data,
              static_cast<std::size_t>(transfer.bytes));
  if (const auto end = shared_->ends[static_cast<std::size_t>(transfer.node)].lock()) {
    end->finish(other.batch);
  }
  return true;
}

// One transfer of a batch, or its posting, has completed.
void LocalTransport::finish(std::int64_t batch) {
  --missing_[static_cast<std::size_t>(batch - first_)];
  for (; !missing_.empty() && missing_.front() == 0; ++first_) {
    missing_.pop_front();
    complete();
  }
}

int LocalTransport::awaited() const {
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [way, waiting] : shared_->receives) {
    if (way.to == node_ && !waiting.empty()) return way.from;
  }
  for (const auto& [way, waiting] : shared_->sends) {
    if (way.from == node_ && !waiting.empty()) return way.to;
  }
  return -1;
}

void LocalTransport::disconnect() {
  const std::lock_guard lock(shared_->mutex);
  connected_ = false;
  for (auto& [way, waiting] : shared_->sends) {
    if (way.from == node_) waiting.clear();
  }
  for (auto& [way, waiting] : shared_->receives) {
    if (way.to == node_) waiting.clear();
  }
}

template <class Tell>
void LocalTransport::tell_others(Tell tell) {
  std::vector<std::shared_ptr<LocalTransport>> others;
  {
    const std::lock_guard lock(shared_->mutex);
    for (const auto& end : shared_->ends) {
      if (auto other = end.lock(); other != nullptr && other.get() != this) others.push_back(other);
    }
  }
  for (const auto& other : others) tell(*other);
}

void LocalTransport::stop(std::span<const std::byte> farewell) {
  tell_others([&](LocalTransport& other) { other.heard(node_, farewell); });
}

void LocalTransport::leave(std::span<const std::byte> farewell) {
  tell_others([&](LocalTransport& other) {
    other.heard(node_, farewell);
    other.lose(node_);
  });
}

}  // namespace pycomm::cpu

#include "cpu/internode/transport.h"

#include <cstring>

#include "cpu/waiting_time.h"

namespace pycomm::cpu {
namespace {

constexpr auto kLook = std::chrono::milliseconds(20);

}  // namespace

bool Transport::wait(std::int64_t rounds, Clock::duration patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return completed_ >= rounds; });
}

bool Transport::lost(int host) const {
  const std::lock_guard lock(mutex_);
  return lost_.contains(host);
}

void Transport::complete() {
  const std::lock_guard lock(mutex_);
  ++completed_;
  changed_.notify_all();
}

void Transport::lose(int host) {
  const std::lock_guard lock(mutex_);
  lost_.insert(host);
}

void Transport::finished(int host) {
  const std::lock_guard lock(mutex_);
  ended_.insert(host);
  changed_.notify_all();
}

void Transport::heard(int host, std::span<const std::byte> farewell) {
  {
    const std::lock_guard lock(listener_mutex_);
    // The first one is the last.
    if (!farewells_.try_emplace(host, farewell.begin(), farewell.end()).second) return;
    if (listener_) listener_(host, farewell);
  }
  finished(host);
}

void Transport::wait_for_farewells(int hosts, Clock::duration patience) {
  std::unique_lock lock(mutex_);
  const auto all_ended = [&] { return static_cast<int>(ended_.size()) >= hosts; };
  for (WaitingTime waited; !changed_.wait_for(lock, kLook, all_ended);) {
    if (waited.until(Clock::now()) > patience) return;
  }
}

void Transport::listen(Listener listener) {
  const std::lock_guard lock(listener_mutex_);
  listener_ = std::move(listener);
  if (!listener_) return;
  for (const auto& [host, farewell] : farewells_) listener_(host, farewell);
}

std::vector<std::shared_ptr<LocalTransport>> LocalTransport::make(int hosts) {
  const auto shared = std::make_shared<Shared>();
  std::vector<std::shared_ptr<LocalTransport>> ends;
  for (int host = 0; host < hosts; ++host) {
    ends.emplace_back(new LocalTransport(shared, host));
    shared->ends.push_back(ends.back());
  }
  return ends;
}

void LocalTransport::post(const Round& round) {
  const std::lock_guard lock(shared_->mutex);
  const std::int64_t number = first_ + static_cast<std::int64_t>(missing_.size());
  if (!connected_) return missing_.push_back(1);  // it will never complete
  missing_.push_back(static_cast<std::int64_t>(round.sends.size() + round.receives.size()) + 1);
  for (const Parcel& parcel : round.sends) {
    const std::pair way{host_, parcel.host};
    if (meet(shared_->receives[way], parcel, true)) {
      finish(number);
    } else {
      shared_->sends[way].push_back({parcel, number});
    }
  }
  for (const Parcel& parcel : round.receives) {
    const std::pair way{parcel.host, host_};
    if (meet(shared_->sends[way], parcel, false)) {
      finish(number);
    } else {
      shared_->receives[way].push_back({parcel, number});
    }
  }
  finish(number);
}

// Whether the other side has been there already.
bool LocalTransport::meet(std::deque<Waiting>& others, const Parcel& parcel, bool sending) {
  if (others.empty()) return false;
  const Waiting other = others.front();
  others.pop_front();
  PYCOMM_CHECK(other.parcel.bytes == parcel.bytes, "machines disagree about a parcel's size");
  std::memcpy(sending ? other.parcel.data : parcel.data, sending ? parcel.data : other.parcel.data,
              static_cast<std::size_t>(parcel.bytes));
  if (const auto end = shared_->ends[static_cast<std::size_t>(parcel.host)].lock()) {
    end->finish(other.round);
  }
  return true;
}

// One thing that the round has waited for is there.
void LocalTransport::finish(std::int64_t round) {
  --missing_[static_cast<std::size_t>(round - first_)];
  for (; !missing_.empty() && missing_.front() == 0; ++first_) {
    missing_.pop_front();
    complete();
  }
}

int LocalTransport::awaited() const {
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [way, waiting] : shared_->receives) {
    if (way.second == host_ && !waiting.empty()) return way.first;
  }
  for (const auto& [way, waiting] : shared_->sends) {
    if (way.first == host_ && !waiting.empty()) return way.second;
  }
  return -1;
}

void LocalTransport::disconnect() {
  const std::lock_guard lock(shared_->mutex);
  connected_ = false;
  for (auto& [way, waiting] : shared_->sends) {
    if (way.first == host_) waiting.clear();
  }
  for (auto& [way, waiting] : shared_->receives) {
    if (way.second == host_) waiting.clear();
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
  tell_others([&](LocalTransport& other) { other.heard(host_, farewell); });
}

void LocalTransport::leave(std::span<const std::byte> farewell) {
  tell_others([&](LocalTransport& other) {
    other.heard(host_, farewell);
    other.lose(host_);
  });
}

}  // namespace pycomm::cpu

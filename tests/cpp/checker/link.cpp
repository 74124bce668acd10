#include "cpu/internode/link.h"

#include <cstring>

#include "checker/fibers.h"

namespace pycomm::cpu {

using checker::Thread;
using checker::Violation;

void Link::begin_tensor(const Operation& operation, const void* input, void* output,
                        Outlook outlook) {
  operation_ = operation;
  input_ = static_cast<std::byte*>(const_cast<void*>(input));
  output_ = static_cast<std::byte*>(output);
  outlook_ = outlook;
}

void Link::publish() {
  Greeting& mine = greetings_[static_cast<std::size_t>(rank())];
  mine = {local_.called(), outlook_};
  Round round;
  for (int m = 0; m < size(); ++m) {
    if (m == rank()) continue;
    auto* const theirs = reinterpret_cast<std::byte*>(&greetings_[static_cast<std::size_t>(m)]);
    round.sends.push_back({m, reinterpret_cast<std::byte*>(&mine), sizeof(Greeting)});
    round.receives.push_back({m, theirs, sizeof(Greeting)});
  }
  greeted_ = post(round);
}

void Link::meet() {
  wait(greeted_);
  outlook_ = greetings_[0].outlook;
  for (const Greeting& greeting : greetings_) {
    if (!(greeting.operation == local_.called())) throw Violation("nodes do not mean the same");
    outlook_ = outlook_ | greeting.outlook;
  }
}

Network::Message Link::load(Thread& carrier, const Parcel& parcel) {
  if (local_.memory().contains(parcel.data)) {
    return {local_.memory().read_bytes(carrier, parcel.data, parcel.bytes), {}, carrier.clock};
  }
  return {{}, {parcel.data, parcel.data + parcel.bytes}, carrier.clock};
}

void Link::unload(Thread& carrier, const Parcel& parcel, const Network::Message& message) {
  auto bytes = static_cast<std::int64_t>(message.bytes.size());
  for (const checker::Load& load : message.cargo) bytes += load.bytes;
  if (bytes != parcel.bytes) throw Violation("a parcel has another length than its place");
  carrier.clock.join(message.clock);
  if (local_.memory().contains(parcel.data)) {
    local_.memory().write_bytes(carrier, parcel.data, message.cargo);
  } else {
    std::memcpy(parcel.data, message.bytes.data(), message.bytes.size());
  }
}

std::int64_t Link::post(const Round& round) {
  local_.check_aborted();
  Thread& carrier = this->carrier(++posted_);
  if (posted_ - waited_ > static_cast<std::int64_t>(transport_->carriers.size())) {
    throw Violation("more rounds are under way than there may be");
  }
  carrier.clock.join(local_.thread().release());
  carrier.begin("round " + std::to_string(posted_));
  for (const Parcel& parcel : round.sends) {
    network().line(rank(), parcel.host).push_back(load(carrier, parcel));
  }
  for (const Parcel& parcel : round.receives) {
    if (local_.memory().contains(parcel.data)) {
      local_.memory().claim(carrier, parcel.data, parcel.bytes);
    }
  }
  under_way_.push_back(round);
  return posted_;
}

void Link::wait(std::int64_t round) {
  for (; waited_ < round; ++waited_) {
    local_.count_wait();
    Thread& carrier = this->carrier(waited_ + 1);
    for (const Parcel& parcel : under_way_.front().receives) {
      auto& line = network().line(parcel.host, rank());
      const Comm& sender = *network().ends[static_cast<std::size_t>(parcel.host)];
      local_.fibers().wait_until(
          [&] { return !line.empty() || local_.stopped() || sender.dead(); },
          [&] { return local_.thread().when(local_.thread().now()) + " waits for a parcel"; });
      if (line.empty()) throw checker::Stopped();
      const Network::Message message = std::move(line.front());
      line.pop_front();
      unload(carrier, parcel, message);
    }
    under_way_.pop_front();
    local_.thread().clock.join(carrier.release());
  }
}

void Link::tell() {
  for (Comm* const end : network().ends) {
    if (local_.stopped() && !end->stopped()) end->abort();
  }
}

void Link::stop() {
  tell();
  for (Thread* const carrier : transport_->carriers) local_.thread().clock.join(carrier->release());
}

}  // namespace pycomm::cpu

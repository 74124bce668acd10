#include "cpu/internode/link.h"

#include <cstring>

#include "checker/fibers.h"

namespace pycomm::cpu {

using checker::Thread;
using checker::Violation;

void Link::begin_tensor(const Operation& operation, const void* input, void* output,
                        Preflight preflight) {
  operation_ = operation;
  input_ = static_cast<std::byte*>(const_cast<void*>(input));
  output_ = static_cast<std::byte*>(output);
  preflight_ = preflight;
}

void Link::publish(bool to_all) {
  Handshake& mine = handshakes_[static_cast<std::size_t>(rank())];
  mine = {local_.called(), preflight_};
  const int before = (rank() - 1 + size()) % size(), next = (rank() + 1) % size();
  Batch batch;
  announced_.clear();
  for (int m = 0; m < size(); ++m) {
    if (to_all || m == rank() || m == next) announced_.push_back(m);
    if (m == rank()) continue;
    auto* const theirs = reinterpret_cast<std::byte*>(&handshakes_[static_cast<std::size_t>(m)]);
    if (to_all || m == before) {
      batch.sends.push_back({m, reinterpret_cast<std::byte*>(&mine), sizeof(Handshake)});
    }
    if (to_all || m == next) batch.receives.push_back({m, theirs, sizeof(Handshake)});
  }
  handshake_batch_ = post(batch);
}

void Link::check_announcements() {
  preflight_ = kNeutralPreflight;
  for (const int m : announced_) {
    const Handshake& handshake = handshakes_[static_cast<std::size_t>(m)];
    if (!(handshake.operation == local_.called())) throw Violation("nodes do not mean the same");
    preflight_ = preflight_ | handshake.preflight;
  }
}

Network::Message Link::load(Thread& carrier, const Transfer& transfer) {
  if (local_.memory().contains(transfer.data)) {
    return {local_.memory().read_bytes(carrier, transfer.data, transfer.bytes), {}, carrier.clock};
  }
  return {{}, {transfer.data, transfer.data + transfer.bytes}, carrier.clock};
}

void Link::unload(Thread& carrier, const Transfer& transfer, const Network::Message& message) {
  auto bytes = static_cast<std::int64_t>(message.bytes.size());
  for (const checker::Load& load : message.cargo) bytes += load.bytes;
  if (bytes != transfer.bytes) throw Violation("a transfer has another length than its place");
  carrier.clock.join(message.clock);
  if (local_.memory().contains(transfer.data)) {
    local_.memory().write_bytes(carrier, transfer.data, message.cargo);
  } else {
    std::memcpy(transfer.data, message.bytes.data(), message.bytes.size());
  }
}

std::int64_t Link::post(const Batch& batch) {
  local_.check_aborted();
  Thread& carrier = this->carrier(++posted_);
  if (posted_ - waited_ > static_cast<std::int64_t>(transport_->carriers.size())) {
    throw Violation("more batches are under way than there may be");
  }
  carrier.clock.join(local_.thread().release());
  carrier.begin("batch " + std::to_string(posted_));
  for (const Transfer& transfer : batch.sends) {
    network().line(rank(), transfer.node).push_back(load(carrier, transfer));
  }
  for (const Transfer& transfer : batch.receives) {
    if (local_.memory().contains(transfer.data)) {
      local_.memory().claim(carrier, transfer.data, transfer.bytes);
    }
  }
  under_way_.push_back(batch);
  return posted_;
}

void Link::wait(std::int64_t batch, int) {
  for (; waited_ < batch; ++waited_) {
    local_.count_wait();
    Thread& carrier = this->carrier(waited_ + 1);
    for (const Transfer& transfer : under_way_.front().receives) {
      auto& line = network().line(transfer.node, rank());
      const Comm& sender = *network().ends[static_cast<std::size_t>(transfer.node)];
      local_.fibers().wait_until(
          [&] { return !line.empty() || local_.stopped() || sender.dead(); },
          [&] { return local_.thread().when(local_.thread().now()) + " waits for a transfer"; });
      if (line.empty()) throw checker::Stopped();
      const Network::Message message = std::move(line.front());
      line.pop_front();
      unload(carrier, transfer, message);
    }
    under_way_.pop_front();
    local_.thread().clock.join(carrier.release());
    if (waited_ + 1 == handshake_batch_) check_announcements();
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

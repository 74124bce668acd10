// Replaces csrc/cpu/internode/link.h: messages between nodes, with symbols for data. The memory of
// a batch may be read and written until the batch has been waited for, so each batch is a thread of
// its own.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "core/layout.h"
#include "core/nodes.h"
#include "core/record.h"
#include "cpu/executor/comm.h"

namespace pycomm::cpu {

struct Transfer {
  int node;
  std::byte* data;
  std::int64_t bytes;
};
struct Batch {
  std::vector<Transfer> sends, receives;
};

// What the links of one stripe share.
struct Network {
  // A message in flight: symbols, or bytes from memory outside the model.
  struct Message {
    checker::Cargo cargo;
    std::vector<std::byte> bytes;
    checker::Clock clock;
  };
  explicit Network(int nodes)
      : ends(static_cast<std::size_t>(nodes)), lines(ends.size() * ends.size()) {}
  std::deque<Message>& line(int from, int to) {
    return lines[static_cast<std::size_t>(from) * ends.size() + static_cast<std::size_t>(to)];
  }

  std::vector<Comm*> ends;
  std::vector<std::deque<Message>> lines;
};

// Batches use the carriers in turn; no more batches than carriers may be in flight.
struct Transport {
  Network& network;
  std::vector<checker::Thread*> carriers;
};

// As on the CPU, the memory grows if needed.
class Scratch {
 public:
  std::byte* bytes(std::int64_t count) {
    if (count > room_ || data_ == nullptr) {
      room_ = std::max(count, kLine);
      data_ = checker::running().allocate(room_);
    }
    return data_;
  }
  float* floats(std::int64_t count) {
    return reinterpret_cast<float*>(bytes(count * static_cast<std::int64_t>(sizeof(float))));
  }

 private:
  std::byte* data_ = nullptr;
  std::int64_t room_ = 0;
};

class Link {
 public:
  Link(Comm& local, std::shared_ptr<Transport> transport, const Nodes& nodes, Clock::duration)
      : local_(local),
        transport_(std::move(transport)),
        nodes_(nodes),
        handshakes_(static_cast<std::size_t>(nodes.count())),
        areas_(static_cast<std::size_t>(nodes.count())) {
    network().ends[static_cast<std::size_t>(rank())] = &local;
  }

  void begin(void (*)()) { preflight_ = {}; }
  void begin_tensor(const Operation& operation, const void* input, void* output,
                    Preflight preflight);
  void announce() {
    publish(true);
    await_announcements();
  }
  void publish(bool to_all);
  // Handshakes that travel in rounds are empty: only the first one of a node says something.
  static constexpr std::int64_t kHandshakeBytes = 0;
  void write_handshake(std::byte*) const {}
  void read_handshake(int, const std::byte*) {}
  void check_announcements();
  void await_announcements() { wait(handshake_batch_); }
  const Preflight& preflight() const { return preflight_; }

  int rank() const { return nodes_.here; }
  int size() const { return nodes_.count(); }
  int contributors() const { return nodes_.world(); }
  std::int64_t count() const { return operation_.count; }
  std::int64_t elements(std::int64_t bytes) const { return bytes / unit().bytes; }
  checker::Unit unit() const { return {size_of(operation_.dtype)}; }
  Location input() const { return {input_, rank()}; }
  Location output() const { return {output_, rank()}; }
  Location at(Location location, std::int64_t elements) const {
    return {location.data + elements * unit().bytes, location.rank};
  }
  std::byte* announced_area(int r, std::int64_t bytes) {
    return areas_[static_cast<std::size_t>(r)].bytes(bytes);
  }
  [[noreturn]] void blame(int, const std::string& what) { throw checker::Violation(what); }
  void describe(NodeState&) {}

  std::int64_t post(const Batch& batch);
  void wait(std::int64_t batch, int hops = 0);

  LinkTraffic traffic() const { return {}; }
  // tell() passes an abort of this node on to the others. stop() does the same and then returns
  // posted memory to the caller.
  void tell();
  void stop();
  void leave() {}
  void trim() {}

  // For the executors of codecs.
  checker::Pieces read(Location from, std::int64_t units, checker::Unit unit) {
    return local_.memory().read(local_.thread(), from.data, units, unit);
  }
  void write(Location to, const checker::Pieces& pieces, checker::Unit unit) {
    local_.memory().write(local_.thread(), to.data, pieces, unit);
  }
  checker::Pieces sum(const std::vector<checker::Pieces>& terms, bool last) {
    return local_.sum(terms, last, unit());
  }
  checker::Symbols& symbols() { return local_.symbols(); }
  const Operation& called() const { return local_.called(); }

 private:
  struct Handshake {
    Operation operation;
    Preflight preflight;
  };
  Network& network() const { return transport_->network; }
  checker::Thread& carrier(std::int64_t batch) const {
    return *transport_->carriers[static_cast<std::size_t>(batch) % transport_->carriers.size()];
  }
  Network::Message load(checker::Thread& carrier, const Transfer& transfer);
  void unload(checker::Thread& carrier, const Transfer& transfer, const Network::Message& message);

  Comm& local_;
  const std::shared_ptr<Transport> transport_;
  const Nodes& nodes_;
  Operation operation_;
  std::byte* input_ = nullptr;
  std::byte* output_ = nullptr;
  std::vector<Handshake> handshakes_;
  std::vector<int> announced_;
  std::int64_t handshake_batch_ = 0;
  Preflight preflight_;
  std::vector<Scratch> areas_;
  std::deque<Batch> under_way_;
  std::int64_t posted_ = 0, waited_ = 0;
};

}  // namespace pycomm::cpu

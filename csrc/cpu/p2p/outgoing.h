// The messages of this rank to one other rank.
#pragma once

#include <deque>
#include <map>
#include <optional>

#include "cpu/p2p/node.h"
#include "cpu/p2p/ring.h"

namespace pycomm::cpu::p2p {

class Outgoing {
 public:
  Outgoing(Node& node, int to) : node_(node), to_(to) {}

  // Allocates the ring before the first message. Throws OutOfMemory.
  void open();
  // Queues a message, and sends as much of it as the ring has room for.
  void post(RequestPtr request);
  // Does what can be done without waiting. Returns true if it did anything.
  bool progress();
  bool busy() const {
    return !queued_.empty() || !announced_.empty() || !streams_.empty() || !writes_.empty() ||
           !on_device_.empty();
  }

 private:
  // A message that the receiver has accepted.
  struct Accepted {
    std::uint64_t message;
    RequestPtr request;
    std::byte* to = nullptr;  // in the receiver's heap, if it goes there directly
    std::int64_t done = 0;
  };
  // A part of a message on the device that the receiver fetches.
  struct Piece {
    std::int64_t place;
    std::int64_t bytes;
    DeviceCopies::Mark put;  // null once it is there
    bool shown = false;
  };
  struct OnDevice {
    RequestPtr request;
    std::int64_t place;             // where the receiver finds it; else it goes through slots
    std::int64_t done = 0;          // bytes in pieces
    std::deque<Piece> pieces = {};  // that the receiver has not taken
  };
  Frame frame(FrameKind kind, std::uint64_t message, const Request& request,
              std::int64_t bytes) const;
  bool take_answers();
  void accept(const Answer& answer);
  bool send_queued();
  bool stream();
  bool write_directly();
  bool send_pieces();
  bool add_piece(OnDevice& message);
  bool show_piece(std::uint64_t number, OnDevice& message, Piece& piece);
  void piece_taken(const Answer& answer);
  void publish();

  Node& node_;
  const int to_;
  std::optional<SenderEnd> ring_;
  std::uint64_t next_ = 0;
  std::deque<RequestPtr> queued_;                  // not announced yet
  std::map<std::uint64_t, RequestPtr> announced_;  // not accepted yet
  std::deque<Accepted> streams_;
  std::deque<Accepted> writes_;
  std::map<std::uint64_t, OnDevice> on_device_;  // accepted
};

}  // namespace pycomm::cpu::p2p

// The messages of one other rank to this one.
#pragma once

#include <deque>
#include <map>
#include <optional>

#include "cpu/p2p/matcher.h"
#include "cpu/p2p/node.h"
#include "cpu/p2p/ring.h"

namespace pycomm::cpu::p2p {

class Incoming {
 public:
  Incoming(Node& node, Matcher& matcher, int from)
      : node_(node),
        matcher_(matcher),
        from_(from),
        mailbox_(node.window.mailbox(node.rank(), from)) {}

  // Does what can be done without waiting. Returns true if it did anything.
  bool progress();
  // Receives an announced message into the memory of a receive that matches it.
  void accept(RequestPtr receive, const Frame& announced);

 private:
  // An accepted message whose bytes the sender sends.
  struct Delivery {
    RequestPtr receive;
    bool direct;  // the sender writes where the receive wants it
    std::int64_t done = 0;
  };
  // An announced message that this rank reads from the sender's heap.
  struct Reading {
    RequestPtr receive;
    std::uint64_t message;
    const std::byte* data;
    std::int64_t done = 0;
  };
  // A piece that this rank copies from the window of the sender's device.
  struct Fetch {
    RequestPtr receive;
    Answer answer;
    DeviceCopies::Mark copied;
    bool last;
  };
  void open();
  void take(const Frame& frame);
  void take_eager(const Frame& frame);
  void take_data(const Frame& frame);
  void take_written(const Frame& frame);
  void take_piece(const Frame& frame);
  Delivery& delivery(const Frame& frame, bool direct);
  bool read_directly();
  bool end_fetches();
  bool send_answers();
  void complete(const RequestPtr& receive);
  int number() const { return node_.comm.number(from_); }

  Node& node_;
  Matcher& matcher_;
  const int from_;
  Mailbox& mailbox_;
  std::optional<ReceiverEnd> ring_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, Delivery> deliveries_;
  std::deque<Reading> readings_;
  std::deque<Fetch> fetches_;
  std::deque<Answer> answers_;  // for which the queue had no room
};

}  // namespace pycomm::cpu::p2p

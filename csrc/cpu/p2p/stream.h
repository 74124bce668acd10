// The messages between this rank and one rank of another node: a TCP connection for each direction.
//
// The sender opens it and introduces itself. Then frames go to the receiver and answers come back
// (cpu/p2p/frame.h). As inside a node, a small message is sent at once, and a large one when the
// receiver has accepted it: its bytes go from the sender's tensor to the connection, and from the
// connection to the receiver's tensor. Bytes that nobody has taken yet stay in the connection.
//
// A connection also shows whether the other rank lives, so a receiver opens its own, too.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>

#include "core/message.h"
#include "cpu/p2p/matcher.h"
#include "cpu/p2p/node.h"
#include "cpu/p2p/socket.h"

namespace pycomm::cpu::p2p {

// What both directions share. Ranks are numbered as in the whole group.
class Stream {
 public:
  Stream(Node& node, int rank, Socket socket)
      : node_(node), rank_(rank), socket_(std::move(socket)) {}

  Socket& socket() { return socket_; }
  // ended(): nothing more will come. left(): the other rank has said that it leaves the group, or
  // it had gone before this rank connected, so that nobody knows why.
  bool ended() const { return socket_.ended(); }
  bool left() const { return left_ || (ended() && !socket_.was_established()); }

  // What the rank's sockets are watched for (cpu/p2p/streams.h).
  bool watched = false;
  bool watched_for_writing = false;

 protected:
  Node& node_;
  const int rank_;  // at the other end
  Socket socket_;
  bool left_ = false;
};

// Reads the pieces of a stream. Small ones come from a buffer, so that each system call reads several.
class Reader {
 public:
  // Reads as many bytes as there are now.
  std::int64_t read(Socket& socket, std::byte* to, std::int64_t bytes);
  // True if this reader has bytes in its buffer, of which polling the socket would not tell.
  bool has_more() const { return begin_ < end_; }

 private:
  static constexpr std::int64_t kBuffer = 16 << 10;

  std::unique_ptr<std::byte[]> buffer_;
  std::int64_t begin_ = 0, end_ = 0;
};

class OutgoingStream : public Stream {
 public:
  // Connects to a rank.
  OutgoingStream(Node& node, int to, const Port::Address& address,
                 const Introduction& introduction);

  // Queues a message, and sends as much of it as the connection takes.
  void post(RequestPtr request);
  // Does what can be done without waiting. Returns true if it did anything.
  bool progress();
  bool has_more_to_write() const {
    return written_ < head_bytes_ + payload_bytes_ || !queued_.empty() || !accepted_.empty();
  }
  // Says that this rank leaves the group, after all messages.
  void leave();

 private:
  // A message that the receiver has accepted.
  struct Accepted {
    std::uint64_t message;
    RequestPtr request;
    std::int64_t done = 0;
  };
  bool take_answers();
  void take(const Answer& answer);
  bool write();
  bool begin_frame();
  void begin(FrameKind kind, std::uint64_t message, const Request* request, std::int64_t bytes,
             const std::byte* payload);
  void end_frame();

  Reader reader_;
  Answer answer_;
  std::int64_t answer_done_ = 0;
  std::uint64_t next_ = 0;
  std::deque<RequestPtr> queued_;                  // not announced yet
  std::map<std::uint64_t, RequestPtr> announced_;  // not accepted yet
  std::deque<Accepted> accepted_;
  // The piece that is being written: an introduction, or a frame with its payload.
  std::array<std::byte, sizeof(Frame)> head_;
  std::int64_t head_bytes_ = 0;
  const std::byte* payload_ = nullptr;
  std::int64_t payload_bytes_ = 0;
  std::int64_t written_ = 0;
  FrameKind kind_ = FrameKind::left;
};

class IncomingStream : public Stream {
 public:
  // Takes over a connection whose other side has introduced itself.
  IncomingStream(Node& node, Matcher& matcher, int from, Socket socket)
      : Stream(node, from, std::move(socket)), matcher_(matcher) {}

  bool progress();
  bool has_more_to_write() const { return !answers_.empty(); }
  // Receives an announced message into the memory of a receive that matches it.
  void accept(RequestPtr receive, const Frame& announced);
  void leave();

 private:
  // An accepted message.
  struct Delivery {
    RequestPtr receive;
    std::int64_t done = 0;
  };
  bool send_answers();
  bool read();
  void take_head();
  void take_payload();
  std::byte* place_for_eager();
  std::byte* place_for_data();
  void complete(const RequestPtr& receive);

  Matcher& matcher_;
  Reader reader_;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, Delivery> deliveries_;
  std::deque<Answer> answers_;
  std::int64_t answered_ = 0;  // bytes of the first answer
  // The piece that is being read: a frame, or the payload of one.
  Frame frame_;
  bool in_payload_ = false;
  std::byte* to_ = reinterpret_cast<std::byte*>(&frame_);
  std::int64_t missing_ = sizeof(Frame);
  RequestPtr receive_;  // that gets the payload of a small message; null if it waits in:
  std::vector<std::byte> payload_;
};

}  // namespace pycomm::cpu::p2p

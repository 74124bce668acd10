// The streams between a rank and the ranks of other nodes, which are opened when they are needed.
// Ranks are numbered as in the whole group.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/nodes.h"
#include "cpu/p2p/port.h"
#include "cpu/p2p/stream.h"

namespace pycomm::cpu::p2p {

class Streams {
 public:
  // `nodes` and `port` must outlive this object.
  Streams(Node& node, Matcher& matcher, const Nodes& nodes, Port& port);

  // True if a rank is on another node.
  bool reach(int rank) const {
    return rank >= 0 && rank < port_.world() &&
           node_of_[static_cast<std::size_t>(rank)] != nodes_.here;
  }
  void post_send(const RequestPtr& request);
  // Makes sure that this rank learns of the end of a rank that it will receive from; kAnySource
  // stands for all ranks.
  void expect(int source);
  // Receives an announced message into the memory of a receive that matches it.
  void accept(const RequestPtr& receive, const Frame& announced, int source);
  // Does what can be done without waiting. Returns true if it did anything. Throws Malformed.
  bool progress();
  // Sleeps until progress() is possible or a rank of this node knocks, but for at most `most`.
  void sleep(Clock::duration most) const;

  // How a rank has gone, after all that it has sent has been taken; empty if it has not gone, or if
  // this rank has not connected with it. A rank that was gone before counts as one that has left.
  // `time` is the time in which this rank could run. Throws Malformed.
  enum class End { left, died };
  std::optional<End> end_of(int rank, Clock::duration time);

  // Closes all streams. `tells`: first says that this rank leaves the group, and waits for a short
  // time until the others have what it has sent.
  void leave(bool tells);

  // A rank has sent invalid data.
  struct Malformed : std::invalid_argument {
    Malformed(int rank, const char* what) : std::invalid_argument(what), rank(rank) {}
    int rank;
  };

 private:
  // A connection whose other side has not introduced itself yet.
  struct Stranger {
    Socket socket;
    std::array<std::byte, sizeof(Introduction)> said;
    std::size_t heard;
  };
  // The sockets that poll_ watches.
  enum class Kind : std::uint32_t { port, knocker, stranger, outgoing, incoming };

  OutgoingStream& to(int rank);
  template <class Direction>
  void watch(Direction& stream, Kind kind, int rank);
  void control(int operation, int fd, Kind kind, std::uint32_t number, bool writes) const;
  bool handle(Kind kind, std::uint32_t number);
  template <class Direction>
  bool progress_with(std::map<int, Direction>& streams, Kind kind, int rank);
  bool let_in();
  bool hear(std::uint32_t number);
  void hear_all();

  Node& node_;
  Matcher& matcher_;
  const Nodes& nodes_;
  Port& port_;
  std::vector<int> node_of_;  // by rank
  bool expects_all_ = false;
  Descriptor poll_;
  std::map<int, OutgoingStream> outgoing_;
  std::map<int, IncomingStream> incoming_;
  std::map<std::uint32_t, Stranger> strangers_;
  std::uint32_t next_stranger_ = 0;
  std::map<int, Clock::duration> gone_since_;
};

}  // namespace pycomm::cpu::p2p

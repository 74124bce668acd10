// Where ranks of a group that spans nodes reach a rank: those of other nodes on a TCP port, to send
// it messages, and those of its own node by a knock, when it sleeps.
//
// The port is open from the rendezvous until the rank leaves the group. So the kernel tells the
// others as long as its host runs whether the rank lives.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "core/message.h"
#include "cpu/p2p/socket.h"

namespace pycomm::cpu::p2p {

class Port {
 public:
  struct Address {
    std::string host;
    int port;
    Secret secret;      // what others must know to be heard
    std::string knock;  // Knocker::name
  };

  // `host` is this node's address for other nodes, as a number.
  explicit Port(const std::string& host);

  const Address& address() const { return address_; }
  // Sets the addresses of all ranks, in rank order. Call it before the first message.
  void meet(std::vector<Address> addresses) { addresses_ = std::move(addresses); }
  const Address& of(int rank) const { return addresses_[static_cast<std::size_t>(rank)]; }
  int world() const { return static_cast<int>(addresses_.size()); }

  const Socket& socket() const { return socket_; }
  const Knocker& knocker() const { return knocker_; }
  // Wakes a rank of this node, by its number in the whole group.
  void knock(int rank) const { knocker_.knock(of(rank).knock); }
  // Closes the port, and returns the connections of those that nobody has let in.
  std::vector<Socket> close();

 private:
  Socket socket_;
  Knocker knocker_;
  Address address_;
  std::vector<Address> addresses_;
};

// Says on a connection that this rank leaves the group.
void say_left(Socket& to);
// Waits until all that was written on these connections has arrived, for a short time, and drops
// what comes on them: the kernel forgets what it has not sent if a socket is closed before all that
// came has been read.
void await_sent(std::vector<Socket*> connections);

}  // namespace pycomm::cpu::p2p

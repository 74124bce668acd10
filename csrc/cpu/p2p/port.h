// Where others reach a rank of a group that spans nodes: ranks of other nodes send messages to its
// TCP port, and ranks of its own node wake it by a knock.
//
// The port is open from the rendezvous until the rank leaves the group. So, as long as the rank's
// host runs, its kernel tells the others whether the rank lives.
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
    Secret secret;      // others must send it to be heard
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
  // Closes the port, and returns the connections that still wait to be accepted.
  std::vector<Socket> close();

 private:
  Socket socket_;
  Knocker knocker_;
  Address address_;
  std::vector<Address> addresses_;
};

// Says on a connection that this rank leaves the group.
void say_left(Socket& to);
// Waits for a short time until everything written on these connections has arrived, and drops
// incoming bytes: if a socket is closed with unread bytes, the kernel drops what it has not sent
// yet.
void await_sent(std::vector<Socket*> connections);

}  // namespace pycomm::cpu::p2p

// Sockets between ranks. They never block, and forked children do not have them.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace pycomm::cpu::p2p {

// An owned file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int number() const { return fd_; }

 private:
  int fd_ = -1;
};

// A TCP socket: one that listens, or one end of a connection.
class Socket {
 public:
  Socket() = default;  // none
  // The host is an address of this node, as a number. Throws std::system_error.
  static Socket listen(const std::string& host);
  // A connection, perhaps not established yet; ended() if it is refused. Throws std::system_error
  // if there is no descriptor for it.
  static Socket connect(const std::string& host, int port);
  // The next waiting connection; empty if there is none, or no descriptor for it.
  std::optional<Socket> accept() const;

  int fd() const { return fd_.number(); }
  int port() const;
  // Move as many bytes as can be moved now, and return their number.
  std::int64_t read(void* to, std::int64_t bytes);
  std::int64_t write(std::span<const iovec> parts);
  // True if the other side is gone, after all that has come from it has been read.
  bool ended() const { return ended_; }
  // True if the other side's host has accepted the connection at some time.
  bool was_established() const { return established_; }
  // True if the other side's host has all bytes that were written.
  bool all_sent() const;

 private:
  explicit Socket(int fd);
  void note(std::int64_t result);

  Descriptor fd_;
  bool ended_ = false;
  bool established_ = false;
};

// A datagram socket on which threads of the same node wake the rank that sleeps on it.
class Knocker {
 public:
  Knocker();
  int fd() const { return fd_.number(); }
  // Its address in this network namespace.
  const std::string& name() const { return name_; }
  // Wakes the rank whose Knocker has this name. If a knock is lost, the rank only wakes up later.
  void knock(const std::string& name) const;
  // Forgets the knocks so far.
  void clear() const;

 private:
  Descriptor fd_;
  std::string name_;
};

}  // namespace pycomm::cpu::p2p

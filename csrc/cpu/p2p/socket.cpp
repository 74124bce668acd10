#include "cpu/p2p/socket.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <system_error>

#include "core/types.h"
#include "cpu/group/fork.h"

namespace pycomm::cpu::p2p {
namespace {

constexpr int kFlags = SOCK_NONBLOCK | SOCK_CLOEXEC;

// The kernel notices within seconds if the other host is lost, unless bytes are under way to it.
// TCP_USER_TIMEOUT would also end the connection to a rank that lives but does not receive, because it
// computes.
constexpr std::pair<int, int> kTcpOptions[] = {
    {TCP_NODELAY, 1}, {TCP_KEEPIDLE, 1}, {TCP_KEEPINTVL, 1}, {TCP_KEEPCNT, 5}};

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

int open_socket(int family, int kind) {
  const int fd = socket(family, kind | kFlags, 0);
  if (fd < 0) fail("no socket for messages between ranks can be opened");
  close_in_children({&fd, 1});
  return fd;
}

// An address of a host and a port, in the form that the system wants.
struct SystemAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;

  SystemAddress(const std::string& host, int port) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
    auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
    const auto number = htons(static_cast<std::uint16_t>(port));
    if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
      v4.sin_family = AF_INET;
      v4.sin_port = number;
      length = sizeof(v4);
    } else {
      PYCOMM_CHECK(inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1,
                   "host must be an address, got " + host);
      v6.sin6_family = AF_INET6;
      v6.sin6_port = number;
      length = sizeof(v6);
    }
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// True if the socket has connected to itself, as can happen if no process listens.
bool is_connected_with_itself(int fd) {
  sockaddr_storage mine = {}, theirs = {};
  socklen_t my_length = sizeof(mine), their_length = sizeof(theirs);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &my_length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&theirs), &their_length) == 0 &&
         my_length == their_length && std::memcmp(&mine, &theirs, my_length) == 0;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Socket::Socket(int fd) : fd_(fd) {
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  for (const auto& [option, value] : kTcpOptions) {
    setsockopt(fd, IPPROTO_TCP, option, &value, sizeof(value));
  }
}

Socket Socket::listen(const std::string& host) {
  const SystemAddress address(host, 0);
  Socket made(open_socket(address.storage.ss_family, SOCK_STREAM));
  if (bind(made.fd(), address.get(), address.length) != 0 || ::listen(made.fd(), SOMAXCONN) != 0) {
    fail("this rank cannot listen for messages of other nodes");
  }
  return made;
}

Socket Socket::connect(const std::string& host, int port) {
  const SystemAddress address(host, port);
  Socket made(open_socket(address.storage.ss_family, SOCK_STREAM));
  const int result = ::connect(made.fd(), address.get(), address.length);
  made.ended_ = (result != 0 && errno != EINPROGRESS) || is_connected_with_itself(made.fd());
  return made;
}

std::optional<Socket> Socket::accept() const {
  const int fd = accept4(this->fd(), nullptr, nullptr, kFlags);
  if (fd < 0) return {};
  close_in_children({&fd, 1});
  Socket made(fd);
  made.established_ = true;
  return made;
}

int Socket::port() const {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  if (getsockname(fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) fail("getsockname");
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);  // at the same place in v6
}

void Socket::note(std::int64_t result) {
  if (result > 0) {
    established_ = true;
  } else if (result == 0 || (errno != EAGAIN && errno != EINTR)) {
    ended_ = true;
  }
}

std::int64_t Socket::read(void* to, std::int64_t bytes) {
  if (ended_) return 0;
  const std::int64_t result = recv(fd(), to, static_cast<std::size_t>(bytes), 0);
  note(result);
  return std::max<std::int64_t>(result, 0);
}

// If the other side is gone, what has come from it can still be read, and then read() finds its end.
std::int64_t Socket::write(std::span<const iovec> parts) {
  if (ended_) return 0;
  msghdr message = {};
  message.msg_iov = const_cast<iovec*>(parts.data());
  message.msg_iovlen = parts.size();
  const std::int64_t result = sendmsg(fd(), &message, MSG_NOSIGNAL);
  if (result > 0) established_ = true;
  return std::max<std::int64_t>(result, 0);
}

bool Socket::all_sent() const {
  int left = 0;
  return ended_ || ioctl(fd(), SIOCOUTQ, &left) != 0 || left == 0;
}

Knocker::Knocker() : fd_(open_socket(AF_UNIX, SOCK_DGRAM)) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof(address.sun_family);  // so the kernel chooses a name that is free
  if (bind(fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("bind");
  length = sizeof(address);
  if (getsockname(fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) fail("getsockname");
  name_.assign(address.sun_path + 1, length - sizeof(address.sun_family) - 1);
}

void Knocker::knock(const std::string& name) const {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  const auto size = static_cast<socklen_t>(sizeof(address.sun_family) + 1 + length);
  (void)!sendto(fd(), "", 1, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), size);
}

void Knocker::clear() const {
  std::byte ignored;
  while (recv(fd(), &ignored, sizeof(ignored), 0) >= 0) continue;
}

}  // namespace pycomm::cpu::p2p

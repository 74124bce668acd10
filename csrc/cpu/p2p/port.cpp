#include "cpu/p2p/port.h"

#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "cpu/executor/waiting.h"
#include "cpu/p2p/frame.h"

namespace pycomm::cpu::p2p {
namespace {

constexpr auto kSentWithin = std::chrono::seconds(1);

Secret random_secret() {
  Secret secret;
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    throw std::system_error(errno, std::generic_category(), "no random bytes");
  }
  return secret;
}

}  // namespace

Port::Port(const std::string& host)
    : socket_(Socket::listen(host)),
      address_{host, socket_.port(), random_secret(), knocker_.name()} {}

std::vector<Socket> Port::close() {
  std::vector<Socket> waiting;
  while (std::optional<Socket> next = socket_.accept()) waiting.push_back(std::move(*next));
  socket_ = Socket();
  return waiting;
}

void say_left(Socket& to) {
  const Answer answer{0, kNotInWindow, kStreamContext, AnswerKind::left};
  const iovec part{const_cast<Answer*>(&answer), sizeof(answer)};
  to.write({&part, 1});
}

void await_sent(std::vector<Socket*> connections) {
  std::vector<std::byte> dropped(64 << 10);
  const Clock::time_point end = Clock::now() + kSentWithin;
  while (true) {
    for (Socket* const each : connections) {
      each->read(dropped.data(), static_cast<std::int64_t>(dropped.size()));
    }
    const bool sent = std::all_of(connections.begin(), connections.end(),
                                  [](const Socket* each) { return each->all_sent(); });
    if (sent || Clock::now() > end) return;
    std::this_thread::sleep_for(kNap);
  }
}

}  // namespace pycomm::cpu::p2p

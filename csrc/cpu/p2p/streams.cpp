#include "cpu/p2p/streams.h"

#include <poll.h>
#include <sys/epoll.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace pycomm::cpu::p2p {
namespace {

constexpr int kEvents = 64;
constexpr std::size_t kMostStrangers = 256;  // besides ranks; each takes a descriptor
// What a rank has sent before it ended, and why its group has failed, may come later than its end.
constexpr auto kGrace = std::chrono::milliseconds(500);

}  // namespace

Streams::Streams(Node& node, Matcher& matcher, const Nodes& nodes, Port& port)
    : node_(node),
      matcher_(matcher),
      nodes_(nodes),
      port_(port),
      poll_(epoll_create1(EPOLL_CLOEXEC)) {
  for (int rank = 0; rank < nodes.world(); ++rank) node_of_.push_back(nodes.node_of(rank));
  if (poll_.number() < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  control(EPOLL_CTL_ADD, port_.socket().fd(), Kind::port, 0, false);
  control(EPOLL_CTL_ADD, port_.knocker().fd(), Kind::knocker, 0, false);
}

void Streams::control(int operation, int fd, Kind kind, std::uint32_t number, bool writes) const {
  epoll_event event = {};
  event.events = EPOLLIN | (writes ? EPOLLOUT : 0u);
  event.data.u64 = std::uint64_t{static_cast<std::uint32_t>(kind)} << 32 | number;
  if (epoll_ctl(poll_.number(), operation, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
}

// The stream to a rank, which is opened at the first call.
OutgoingStream& Streams::to(int rank) {
  const auto known = outgoing_.find(rank);
  if (known != outgoing_.end()) return known->second;
  const int self = node_.comm.number(node_.rank());
  const Port::Address& address = port_.of(rank);
  const Introduction introduction{
      header_of(MessageKind::introduction, {address.secret, nodes_.here}), self};
  return outgoing_.try_emplace(rank, node_, rank, address, introduction).first->second;
}

void Streams::post_send(const RequestPtr& request) {
  OutgoingStream& stream = to(request->peer);
  stream.post(request);
  watch(stream, Kind::outgoing, request->peer);
}

void Streams::expect(int source) {
  if (expects_all_) return;
  expects_all_ = source == kAnySource;
  for (int rank = 0; rank < port_.world(); ++rank) {
    if ((source == rank || expects_all_) && reach(rank)) watch(to(rank), Kind::outgoing, rank);
  }
}

void Streams::accept(const RequestPtr& receive, const Frame& announced, int source) {
  incoming_.at(source).accept(receive, announced);
  progress_with(incoming_, Kind::incoming, source);
}

// Watches a stream for what it waits for.
template <class Direction>
void Streams::watch(Direction& stream, Kind kind, int rank) {
  const bool writes = stream.has_more_to_write();
  if (stream.ended()) {
    if (std::exchange(stream.watched, false)) {
      (void)epoll_ctl(poll_.number(), EPOLL_CTL_DEL, stream.socket().fd(), nullptr);
    }
  } else if (!stream.watched || stream.watched_for_writing != writes) {
    control(stream.watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, stream.socket().fd(), kind,
            static_cast<std::uint32_t>(rank), writes);
    stream.watched = true;
    stream.watched_for_writing = writes;
  }
}

bool Streams::progress() {
  epoll_event events[kEvents];
  const int count = epoll_wait(poll_.number(), events, kEvents, 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t who = events[i].data.u64;
    moved |= handle(static_cast<Kind>(who >> 32), static_cast<std::uint32_t>(who));
  }
  return moved;
}

bool Streams::handle(Kind kind, std::uint32_t number) {
  switch (kind) {
    case Kind::port:
      return let_in();
    case Kind::knocker:
      port_.knocker().clear();
      return false;
    case Kind::stranger:
      return hear(number);
    case Kind::outgoing:
      return progress_with(outgoing_, kind, static_cast<int>(number));
    case Kind::incoming:
      return progress_with(incoming_, kind, static_cast<int>(number));
  }
  return false;
}

template <class Direction>
bool Streams::progress_with(std::map<int, Direction>& streams, Kind kind, int rank) {
  Direction& stream = streams.at(rank);
  try {
    const bool moved = stream.progress();
    watch(stream, kind, rank);
    return moved;
  } catch (const std::invalid_argument& error) {
    throw Malformed(rank, error.what());
  }
}

bool Streams::let_in() {
  bool moved = false;
  while (std::optional<Socket> next = port_.socket().accept()) {
    const std::uint32_t number = next_stranger_++;
    control(EPOLL_CTL_ADD, next->fd(), Kind::stranger, number, false);
    strangers_.emplace(number, Stranger{std::move(*next), {}, 0});
    hear(number);  // ranks introduce themselves at once, so mostly others stay strangers
    const std::size_t most = kMostStrangers + node_of_.size();
    if (strangers_.size() > most) strangers_.erase(strangers_.begin());  // the oldest
    moved = true;
  }
  return moved;
}

void Streams::hear_all() {
  let_in();
  for (auto next = strangers_.begin(); next != strangers_.end();) hear((next++)->first);
}

// A connection that is not from a rank of the group is dropped silently.
bool Streams::hear(std::uint32_t number) {
  const auto found = strangers_.find(number);
  if (found == strangers_.end()) return false;
  Stranger& stranger = found->second;
  stranger.heard += static_cast<std::size_t>(
      stranger.socket.read(stranger.said.data() + stranger.heard,
                           static_cast<std::int64_t>(stranger.said.size() - stranger.heard)));
  if (stranger.socket.ended()) {
    strangers_.erase(found);
    return false;
  }
  if (stranger.heard < stranger.said.size()) return true;
  Socket socket = std::move(stranger.socket);
  const auto said = stranger.said;
  strangers_.erase(found);
  const auto node_of = [this](int rank) { return node_of_[static_cast<std::size_t>(rank)]; };
  try {
    const int rank = static_cast<int>(
        parse_introduction(said, port_.address().secret, port_.world(), node_of).rank);
    if (!reach(rank)) return true;
    (void)epoll_ctl(poll_.number(), EPOLL_CTL_DEL, socket.fd(), nullptr);
    const auto [stream, is_new] =
        incoming_.try_emplace(rank, node_, matcher_, rank, std::move(socket));
    if (is_new) progress_with(incoming_, Kind::incoming, rank);
  } catch (const Malformed&) {
    throw;
  } catch (const std::invalid_argument&) {
  }
  return true;
}

void Streams::sleep(Clock::duration most) const {
  pollfd sockets{poll_.number(), POLLIN, 0};
  const auto time = std::chrono::duration_cast<std::chrono::nanoseconds>(most).count();
  const timespec limit{static_cast<time_t>(time / 1'000'000'000),
                       static_cast<long>(time % 1'000'000'000)};
  (void)ppoll(&sockets, 1, &limit, nullptr);
}

// One of the two connections shows that a rank has died: the kernel does not notice that a host is lost
// on a connection with bytes under way to it. A rank that has left may still have messages here.
std::optional<Streams::End> Streams::end_of(int rank, Clock::duration time) {
  const auto out = outgoing_.find(rank);
  const bool has_out = out != outgoing_.end(), out_ended = has_out && out->second.ended();
  if (out_ended && !incoming_.contains(rank)) hear_all();  // its messages may wait here
  const auto in = incoming_.find(rank);
  const bool has_in = in != incoming_.end();
  while (out_ended && has_in && progress_with(incoming_, Kind::incoming, rank)) continue;
  const bool died = out_ended && !out->second.left();
  if (!died && !(has_in ? in->second.ended() : out_ended)) return {};
  const bool left = (has_in && in->second.left()) || (has_out && out->second.left());
  const Clock::duration since = gone_since_.try_emplace(rank, time).first->second;
  if (left) return End::left;
  if (time - since > kGrace) return End::died;
  return {};
}

void Streams::leave(bool tells) {
  std::vector<Socket> waiting = port_.close();
  std::vector<Socket*> all;
  for (auto& [number, stranger] : strangers_) all.push_back(&stranger.socket);
  for (Socket& each : waiting) all.push_back(&each);
  if (tells) {
    for (Socket* const each : all) say_left(*each);
    for (auto& [rank, stream] : outgoing_) stream.leave();
    for (auto& [rank, stream] : incoming_) stream.leave();
  }
  for (auto& [rank, stream] : outgoing_) all.push_back(&stream.socket());
  for (auto& [rank, stream] : incoming_) all.push_back(&stream.socket());
  if (tells) await_sent(all);
  strangers_.clear();
  outgoing_.clear();
  incoming_.clear();
}

}  // namespace pycomm::cpu::p2p

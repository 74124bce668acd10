#include "cpu/p2p/stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pycomm::cpu::p2p {

std::int64_t Reader::read(Socket& socket, std::byte* to, std::int64_t bytes) {
  if (begin_ == end_) {
    if (bytes >= kBuffer) return socket.read(to, bytes);
    if (buffer_ == nullptr) buffer_ = std::make_unique<std::byte[]>(kBuffer);
    begin_ = 0;
    end_ = socket.read(buffer_.get(), kBuffer);
  }
  const std::int64_t n = std::min(bytes, end_ - begin_);
  std::memcpy(to, buffer_.get() + begin_, static_cast<std::size_t>(n));
  begin_ += n;
  return n;
}

OutgoingStream::OutgoingStream(Node& node, int to, const Port::Address& address,
                               const Introduction& introduction)
    : Stream(node, to, Socket::connect(address.host, address.port)) {
  static_assert(sizeof(introduction) <= sizeof(head_));
  std::memcpy(head_.data(), &introduction, sizeof(introduction));
  head_bytes_ = sizeof(introduction);
}

void OutgoingStream::post(RequestPtr request) {
  queued_.push_back(std::move(request));
  if (queued_.size() == 1) write();
}

bool OutgoingStream::progress() {
  const bool answered = take_answers();
  return write() || answered;
}

bool OutgoingStream::take_answers() {
  bool moved = false;
  auto* const bytes = reinterpret_cast<std::byte*>(&answer_);
  while (const std::int64_t n =
             reader_.read(socket_, bytes + answer_done_,
                          static_cast<std::int64_t>(sizeof(Answer)) - answer_done_)) {
    moved = true;
    answer_done_ += n;
    if (answer_done_ < static_cast<std::int64_t>(sizeof(Answer))) continue;
    answer_done_ = 0;
    take(answer_);
  }
  return moved;
}

void OutgoingStream::take(const Answer& answer) {
  PYCOMM_CHECK(answer.context == kStreamContext,
               "an answer has another context than answers between nodes");
  if (answer.kind == AnswerKind::left) {
    left_ = true;
    return;
  }
  const auto found = announced_.find(answer.message);
  PYCOMM_CHECK(found != announced_.end(), "an answer is to a message that was not announced");
  PYCOMM_CHECK(answer.kind == AnswerKind::accept, "an answer has an unknown kind");
  found->second->since = Request::kUnset;
  accepted_.push_back({answer.message, std::move(found->second)});
  announced_.erase(found);
}

// Writes about as much as a frame with data, so that other ranks get their turn.
bool OutgoingStream::write() {
  std::int64_t moved = 0;
  while (moved < kStreamedBytes && (written_ < head_bytes_ + payload_bytes_ || begin_frame())) {
    const std::int64_t from_head = std::min(written_, head_bytes_);
    const std::int64_t from_payload = written_ - from_head;
    const iovec parts[] = {
        {head_.data() + from_head, static_cast<std::size_t>(head_bytes_ - from_head)},
        {const_cast<std::byte*>(payload_) + from_payload,
         static_cast<std::size_t>(payload_bytes_ - from_payload)}};
    const std::int64_t n = socket_.write(parts);
    if (n == 0) break;
    moved += n;
    written_ += n;
    if (written_ == head_bytes_ + payload_bytes_) end_frame();
  }
  return moved > 0;
}

// Small messages and announcements go before the bytes of large messages. Returns false if there is
// nothing to send.
bool OutgoingStream::begin_frame() {
  if (!queued_.empty()) {
    const Request& request = *queued_.front();
    const std::int64_t bytes = request.envelope.bytes;
    const bool eager = bytes <= kEagerBytes;
    begin(eager ? FrameKind::eager : FrameKind::announce, next_++, &request, bytes, request.data);
    return true;
  }
  if (accepted_.empty()) return false;
  const Accepted& first = accepted_.front();
  const std::int64_t left = first.request->envelope.bytes - first.done;
  begin(FrameKind::data, first.message, first.request.get(), std::min(left, kStreamedBytes),
        first.request->data + first.done);
  return true;
}

void OutgoingStream::begin(FrameKind kind, std::uint64_t message, const Request* request,
                           std::int64_t bytes, const std::byte* payload) {
  Frame frame = {};  // with its padding, which must not show this process's memory
  frame.context = kStreamContext;
  frame.kind = kind_ = kind;
  frame.element = request == nullptr ? Element::u8 : request->envelope.element;
  frame.channel = request == nullptr ? Channel::program : request->envelope.channel;
  frame.tag = request == nullptr ? 0 : request->envelope.tag;
  frame.message = message;
  frame.bytes = bytes;
  frame.offset = kNotInWindow;
  std::memcpy(head_.data(), &frame, sizeof(frame));
  head_bytes_ = sizeof(frame);
  payload_ = payload;
  payload_bytes_ = payload_of(frame);
  written_ = 0;
}

// What begin_frame() has begun has been written.
void OutgoingStream::end_frame() {
  const std::int64_t bytes = std::exchange(payload_bytes_, 0);
  const bool introduces = head_bytes_ != sizeof(Frame);
  head_bytes_ = written_ = 0;
  if (introduces || kind_ == FrameKind::left) return;
  if (kind_ == FrameKind::data) {
    Accepted& first = accepted_.front();
    first.done += bytes;
    first.request->since = Request::kUnset;
    if (first.done < first.request->envelope.bytes) return;
    node_.requests.complete(first.request);
    accepted_.pop_front();
    return;
  }
  const RequestPtr request = std::move(queued_.front());
  queued_.pop_front();
  request->since = Request::kUnset;
  if (kind_ == FrameKind::eager) {
    node_.requests.complete(request);
  } else {
    announced_[next_ - 1] = request;
  }
}

void OutgoingStream::leave() {
  write();  // the introduction, if this rank has sent nothing
  if (has_more_to_write()) return;
  begin(FrameKind::left, 0, nullptr, 0, nullptr);
  write();
}

bool IncomingStream::progress() {
  const bool moved = read();
  return send_answers() || moved;
}

// Reads about as much as a frame with data, so that other ranks get their turn, but always
// everything that the reader has buffered.
bool IncomingStream::read() {
  std::int64_t moved = 0;
  while (moved < kStreamedBytes || reader_.has_more()) {
    const std::int64_t n = reader_.read(socket_, to_, missing_);
    if (n == 0) break;
    moved += n;
    to_ += n;
    missing_ -= n;
    if (missing_ == 0) in_payload_ ? take_payload() : take_head();
  }
  return moved > 0;
}

void IncomingStream::take_head() {
  check_streamed_frame(frame_);
  if (frame_.kind <= FrameKind::announce) {
    PYCOMM_CHECK(frame_.message == next_++, "a message is out of order");
  }
  switch (frame_.kind) {
    case FrameKind::eager:
      to_ = place_for_eager();
      break;
    case FrameKind::announce:
      if (RequestPtr receive = matcher_.take_receive(rank_, frame_)) {
        accept(std::move(receive), frame_);
      } else {
        matcher_.keep(Arrival{rank_, frame_, {}});
      }
      break;
    case FrameKind::data:
      to_ = place_for_data();
      break;
    default:
      left_ = true;
      break;
  }
  missing_ = payload_of(frame_);
  in_payload_ = true;
  if (missing_ == 0) take_payload();
}

// A message whose receive is posted later, perhaps while its bytes come, waits in private memory.
std::byte* IncomingStream::place_for_eager() {
  receive_ = matcher_.take_receive(rank_, frame_);
  if (receive_ == nullptr) {
    payload_.resize(static_cast<std::size_t>(frame_.bytes));
    return payload_.data();
  }
  node_.check_match(rank_, frame_, *receive_);
  receive_->matched = true;
  receive_->peer = rank_;
  return receive_->data;
}

std::byte* IncomingStream::place_for_data() {
  const auto found = deliveries_.find(frame_.message);
  PYCOMM_CHECK(found != deliveries_.end(), "a frame belongs to an unknown message");
  const Delivery& delivery = found->second;
  PYCOMM_CHECK(frame_.bytes <= delivery.receive->envelope.bytes - delivery.done,
               "a message is too long");
  return delivery.receive->data + delivery.done;
}

// A frame has arrived with its payload.
void IncomingStream::take_payload() {
  if (frame_.kind == FrameKind::data) {
    const auto found = deliveries_.find(frame_.message);
    Delivery& delivery = found->second;
    delivery.done += frame_.bytes;
    delivery.receive->since = Request::kUnset;
    if (delivery.done == delivery.receive->envelope.bytes) {
      complete(delivery.receive);
      deliveries_.erase(found);
    }
  } else if (frame_.kind == FrameKind::eager) {
    if (receive_ == nullptr && (receive_ = matcher_.take_receive(rank_, frame_)) != nullptr) {
      node_.check_match(rank_, frame_, *receive_);
      if (!payload_.empty()) std::memcpy(receive_->data, payload_.data(), payload_.size());
    }
    if (const RequestPtr receive = std::exchange(receive_, nullptr)) {
      complete(receive);
    } else {
      matcher_.keep(Arrival{rank_, frame_, std::exchange(payload_, {})});
    }
  }
  in_payload_ = false;
  to_ = reinterpret_cast<std::byte*>(&frame_);
  missing_ = sizeof(Frame);
}

void IncomingStream::accept(RequestPtr receive, const Frame& announced) {
  node_.check_match(rank_, announced, *receive);
  receive->matched = true;
  receive->peer = rank_;
  receive->since = Request::kUnset;
  deliveries_[announced.message] = {std::move(receive)};
  answers_.push_back({announced.message, kNotInWindow, kStreamContext, AnswerKind::accept});
}

bool IncomingStream::send_answers() {
  bool moved = false;
  while (!answers_.empty()) {
    auto* const bytes = reinterpret_cast<std::byte*>(&answers_.front());
    const iovec part{bytes + answered_, sizeof(Answer) - static_cast<std::size_t>(answered_)};
    const std::int64_t n = socket_.write({&part, 1});
    if (n == 0) break;
    moved = true;
    answered_ += n;
    if (answered_ < static_cast<std::int64_t>(sizeof(Answer))) continue;
    answered_ = 0;
    answers_.pop_front();
  }
  return moved;
}

void IncomingStream::leave() {
  if (answers_.empty()) say_left(socket_);
}

void IncomingStream::complete(const RequestPtr& receive) {
  receive->source = rank_;
  node_.requests.complete(receive);
}

}  // namespace pycomm::cpu::p2p

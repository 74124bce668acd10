#include "cpu/p2p/incoming.h"

#include <algorithm>
#include <utility>

namespace pycomm::cpu::p2p {

void Incoming::open() {
  const std::int64_t offset = mailbox_.sender.ring.load(std::memory_order_acquire);
  if (offset == 0) return;
  const Range heap = node_.heap_range();
  PYCOMM_CHECK(offset != kNotInWindow && offset % kLine == 0,
               "a ring lies at an impossible offset");
  check_place(offset, kAllocationBytes, heap);
  ring_.emplace(mailbox_, node_.window.in_heap(from_, offset, kAllocationBytes), node_.window.id(),
                heap);
}

bool Incoming::progress() {
  if (!ring_) open();
  if (!ring_) return false;
  bool moved = false;
  Frame frame;
  // At most about a ring's content, so that other ranks get their turn.
  for (std::int64_t bytes = 0; bytes < kRingBytes && ring_->next(frame); moved = true) {
    take(frame);
    ring_->release(frame);
    bytes += length_of(frame);
  }
  moved |= read_directly();
  moved |= end_fetches();
  moved |= send_answers();
  if (moved) node_.wake(from_);
  return moved;
}

void Incoming::take(const Frame& frame) {
  switch (frame.kind) {
    case FrameKind::eager:
    case FrameKind::announce:
      PYCOMM_CHECK(frame.message == next_++, "a message is out of order");
      break;
    case FrameKind::data:
      return take_data(frame);
    case FrameKind::written:
      return take_written(frame);
    case FrameKind::piece:
      return take_piece(frame);
    case FrameKind::left:  // check_frame() has refused it
      return;
  }
  if (frame.kind == FrameKind::eager) return take_eager(frame);
  if (RequestPtr receive = matcher_.take_receive(number(), frame)) {
    accept(std::move(receive), frame);
  } else {
    matcher_.keep(Arrival{number(), frame, {}});
  }
}

void Incoming::take_eager(const Frame& frame) {
  if (const RequestPtr receive = matcher_.take_receive(number(), frame)) {
    node_.check_match(number(), frame, *receive);
    ring_->read_payload(frame, receive->data);
    return complete(receive);
  }
  Arrival arrival{number(), frame, std::vector<std::byte>(static_cast<std::size_t>(frame.bytes))};
  ring_->read_payload(frame, arrival.payload.data());
  matcher_.keep(std::move(arrival));
}

void Incoming::accept(RequestPtr receive, const Frame& announced) {
  node_.check_match(number(), announced, *receive);
  receive->matched = true;
  receive->peer = number();
  receive->since = Request::kUnset;
  if (announced.offset != kNotInWindow) {
    const std::byte* const data = node_.window.in_heap(from_, announced.offset, announced.bytes);
    readings_.push_back({std::move(receive), announced.message, data});
    return;
  }
  const std::int64_t place =
      node_.window.place_in_heap(node_.rank(), receive->data, announced.bytes);
  receive->exposed_at = place;
  deliveries_[announced.message] = {std::move(receive), place != kNotInWindow};
  answers_.push_back({announced.message, place, node_.window.id(), AnswerKind::accept});
}

Incoming::Delivery& Incoming::delivery(const Frame& frame, bool direct) {
  const auto found = deliveries_.find(frame.message);
  PYCOMM_CHECK(found != deliveries_.end() && found->second.direct == direct,
               "a frame belongs to an unknown message");
  return found->second;
}

void Incoming::take_data(const Frame& frame) {
  Delivery& to = delivery(frame, false);
  const std::int64_t bytes = to.receive->envelope.bytes;
  PYCOMM_CHECK(frame.bytes > 0 && frame.bytes <= bytes - to.done, "a message is too long");
  ring_->read_payload(frame, to.receive->data + to.done);
  to.done += frame.bytes;
  to.receive->since = Request::kUnset;
  if (to.done < bytes) return;
  complete(to.receive);
  deliveries_.erase(frame.message);
}

// The sender wrote to the receive's pages as they were when this rank accepted the message. If a
// group that failed has taken them from other processes since, part of the message may be lost.
void Incoming::take_written(const Frame& frame) {
  const RequestPtr& receive = delivery(frame, true).receive;
  if (node_.window.place_in_heap(node_.rank(), receive->data, receive->envelope.bytes) !=
      receive->exposed_at) {
    throw std::runtime_error(
        "another group, which has failed, has detached the receive's memory from the window");
  }
  complete(receive);
  deliveries_.erase(frame.message);
}

bool Incoming::read_directly() {
  if (readings_.empty()) return false;
  Reading& reading = readings_.front();
  const std::int64_t bytes = reading.receive->envelope.bytes;
  const std::int64_t n = std::min(bytes - reading.done, kSliceBytes);
  node_.copy_in_peers_heap(reading.receive->data + reading.done, reading.data + reading.done, n);
  reading.done += n;
  reading.receive->since = Request::kUnset;
  if (reading.done < bytes) return true;
  answers_.push_back({reading.message, kNotInWindow, node_.window.id(), AnswerKind::taken});
  complete(reading.receive);
  readings_.pop_front();
  return true;
}

// From the sender's device to this rank's, or to host memory if the receive has no other.
void Incoming::take_piece(const Frame& frame) {
  const auto found = deliveries_.find(frame.message);
  PYCOMM_CHECK(found != deliveries_.end() && node_.copies != nullptr,
               "a piece belongs to an unknown message");
  Delivery& to = found->second;
  Request& receive = *to.receive;
  const std::int64_t bytes = receive.envelope.bytes;
  PYCOMM_CHECK(frame.bytes > 0 && frame.bytes <= bytes - to.done, "a message is too long");
  receive.arrived_on_device = receive.on_device != nullptr;
  std::byte* const memory = receive.arrived_on_device ? receive.on_device : receive.data;
  DeviceCopies::Mark copied =
      node_.copies->fetch(memory + to.done, from_, frame.offset, frame.bytes);
  to.done += frame.bytes;
  receive.since = Request::kUnset;
  const bool last = to.done == bytes;
  const Answer answer{frame.message, frame.offset, node_.window.id(), AnswerKind::taken};
  fetches_.push_back({to.receive, answer, std::move(copied), last});
  if (last) deliveries_.erase(found);
}

// A sender that has failed may have overwritten what was copied after its abort.
bool Incoming::end_fetches() {
  bool moved = false;
  for (; !fetches_.empty() && node_.passed(fetches_.front().copied); moved = true) {
    if (node_.comm.aborted() != 0) throw Stopped();
    const Fetch& done = fetches_.front();
    answers_.push_back(done.answer);
    done.receive->since = Request::kUnset;
    if (done.last) complete(done.receive);
    fetches_.pop_front();
  }
  return moved;
}

bool Incoming::send_answers() {
  bool moved = false;
  for (; !answers_.empty() && ring_->answer(answers_.front()); moved = true) answers_.pop_front();
  return moved;
}

void Incoming::complete(const RequestPtr& receive) {
  receive->source = number();
  node_.requests.complete(receive);
}

}  // namespace pycomm::cpu::p2p

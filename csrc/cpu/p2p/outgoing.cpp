#include "cpu/p2p/outgoing.h"

#include <algorithm>
#include <utility>

namespace pycomm::cpu::p2p {

void Outgoing::open() {
  if (ring_) return;
  std::byte* const memory = node_.window.allocate_for_good(node_.rank(), kAllocationBytes);
  Mailbox& mailbox = node_.window.mailbox(to_, node_.rank());
  ring_.emplace(mailbox, memory);
  mailbox.sender.ring.store(node_.window.place_in_heap(node_.rank(), memory, kAllocationBytes),
                            std::memory_order_release);
}

void Outgoing::post(RequestPtr request) {
  queued_.push_back(std::move(request));
  if (queued_.size() == 1) {
    send_queued();
    publish();
  }
}

bool Outgoing::progress() {
  if (!busy()) return false;
  bool moved = take_answers();
  moved |= send_queued();
  publish();
  moved |= stream();
  moved |= write_directly();
  moved |= send_pieces();
  return moved;
}

void Outgoing::publish() {
  if (ring_->publish()) node_.wake(to_);
}

Frame Outgoing::frame(FrameKind kind, std::uint64_t message, const Request& request,
                      std::int64_t bytes) const {
  const Envelope& envelope = request.envelope;
  return {node_.window.id(), kind,  envelope.element, envelope.tag,
          message,           bytes, kNotInWindow,     envelope.channel};
}

// Sends small messages and announces large ones, in the order of the calls.
bool Outgoing::send_queued() {
  bool moved = false;
  for (; !queued_.empty(); moved = true) {
    const RequestPtr& request = queued_.front();
    const std::int64_t bytes = request->envelope.bytes;
    const bool eager = bytes <= kEagerBytes;
    Frame header = frame(eager ? FrameKind::eager : FrameKind::announce, next_, *request, bytes);
    if (ring_->room() < length_of(header)) break;
    if (!eager) {
      if (request->on_device == nullptr) {
        header.offset = node_.window.place_in_heap(node_.rank(), request->data, bytes);
      }
      request->exposed_at = header.offset;
      announced_[next_] = request;
    }
    ring_->write(header, request->data);
    if (eager) node_.requests.complete(request);
    request->since = Request::kUnset;
    ++next_;
    queued_.pop_front();
  }
  return moved;
}

bool Outgoing::take_answers() {
  bool moved = false;
  for (Answer answer{}; ring_->next(answer); moved = true) {
    PYCOMM_CHECK(answer.context == node_.window.id(), "an answer is from another group");
    if (on_device_.contains(answer.message)) {
      piece_taken(answer);
      continue;
    }
    const auto found = announced_.find(answer.message);
    PYCOMM_CHECK(found != announced_.end(), "an answer is to a message that was not announced");
    if (answer.kind == AnswerKind::accept) {
      accept(answer);
    } else {
      PYCOMM_CHECK(answer.kind == AnswerKind::taken && found->second->exposed_at != kNotInWindow,
                   "an answer has an unknown kind");
      node_.requests.complete(found->second);
    }
    announced_.erase(answer.message);
  }
  return moved;
}

void Outgoing::accept(const Answer& answer) {
  Accepted accepted{answer.message, announced_[answer.message]};
  const std::int64_t bytes = accepted.request->envelope.bytes;
  accepted.request->since = Request::kUnset;
  check_place(answer.offset, bytes, node_.heap_range());
  if (accepted.request->on_device != nullptr) {
    const std::int64_t place = node_.copies->place_of(accepted.request->on_device, bytes);
    on_device_[answer.message] = {std::move(accepted.request), place};
  } else if (answer.offset == kNotInWindow) {
    streams_.push_back(std::move(accepted));
  } else {
    accepted.to = node_.window.in_heap(to_, answer.offset, bytes);
    writes_.push_back(std::move(accepted));
  }
}

// Sends the next bytes of the first accepted message, as far as there is room.
bool Outgoing::stream() {
  bool moved = false;
  while (!streams_.empty()) {
    Accepted& accepted = streams_.front();
    Request& request = *accepted.request;
    const std::int64_t left = request.envelope.bytes - accepted.done;
    const Frame next =
        frame(FrameKind::data, accepted.message, request, std::min(left, kDataBytes));
    if (ring_->room() < length_of(next)) break;
    ring_->write(next, request.data + accepted.done);
    publish();
    accepted.done += next.bytes;
    request.since = Request::kUnset;
    moved = true;
    if (next.bytes < left) continue;
    node_.requests.complete(accepted.request);
    streams_.pop_front();
  }
  return moved;
}

bool Outgoing::write_directly() {
  if (writes_.empty()) return false;
  Accepted& accepted = writes_.front();
  Request& request = *accepted.request;
  const std::int64_t bytes = request.envelope.bytes;
  const std::int64_t n = std::min(bytes - accepted.done, kSliceBytes);
  if (n > 0) {
    node_.copy_in_peers_heap(accepted.to + accepted.done, request.data + accepted.done, n);
    accepted.done += n;
    request.since = Request::kUnset;
    if (accepted.done < bytes) return true;
  }
  const Frame last = frame(FrameKind::written, accepted.message, request, bytes);
  if (ring_->room() < length_of(last)) return n > 0;
  ring_->write(last);
  publish();
  node_.requests.complete(accepted.request);
  writes_.pop_front();
  return true;
}

bool Outgoing::send_pieces() {
  bool moved = false;
  for (auto& [number, message] : on_device_) {
    while (add_piece(message)) moved = true;
    for (Piece& piece : message.pieces) {
      if (piece.shown) continue;
      if (!show_piece(number, message, piece)) break;
      moved = true;
    }
  }
  publish();
  return moved;
}

// What other ranks cannot use where it lies is copied to a slot first.
bool Outgoing::add_piece(OnDevice& message) {
  Request& request = *message.request;
  const std::int64_t bytes = request.envelope.bytes;
  if (message.done == bytes || !node_.passed(request.ready)) return false;
  if (message.place != kNotInWindow) {
    message.pieces.push_back({message.place, bytes, nullptr});
  } else {
    if (node_.free_slots.empty()) return false;
    const std::int64_t slot = node_.free_slots.back();
    const std::int64_t n = std::min(bytes - message.done, kSlotBytes);
    message.pieces.push_back(
        {slot, n, node_.copies->put(slot, request.on_device + message.done, n)});
    node_.free_slots.pop_back();
  }
  message.done += message.pieces.back().bytes;
  request.since = Request::kUnset;
  return true;
}

bool Outgoing::show_piece(std::uint64_t number, OnDevice& message, Piece& piece) {
  Frame next = frame(FrameKind::piece, number, *message.request, piece.bytes);
  next.offset = piece.place;
  if (!node_.passed(piece.put) || ring_->room() < length_of(next)) return false;
  ring_->write(next);
  message.request->since = Request::kUnset;
  return piece.shown = true;
}

void Outgoing::piece_taken(const Answer& answer) {
  OnDevice& message = on_device_.at(answer.message);
  PYCOMM_CHECK(answer.kind == AnswerKind::taken && !message.pieces.empty() &&
                   message.pieces.front().shown && message.pieces.front().place == answer.offset,
               "an answer is to a piece that was not sent");
  if (message.place == kNotInWindow) node_.free_slots.push_back(answer.offset);
  message.pieces.pop_front();
  message.request->since = Request::kUnset;
  if (message.done < message.request->envelope.bytes || !message.pieces.empty()) return;
  node_.requests.complete(message.request);
  on_device_.erase(answer.message);
}

}  // namespace pycomm::cpu::p2p

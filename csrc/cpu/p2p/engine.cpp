#include "cpu/p2p/engine.h"

#include <cstring>
#include <utility>

#include "cpu/executor/threads.h"
#include "cpu/group/fork.h"
#include "cpu/group/operation_lock.h"

namespace pycomm::cpu::p2p {

std::string describe(std::int64_t bytes, Element element) {
  return std::to_string(bytes / size_of(element)) + " " + name_of(element);
}

std::string describe(const Disagreement& disagreement, int sender, int receiver) {
  const Disagreement read = disagreement;
  if (!is_element(read.sent) || !is_element(read.received)) return {};
  return "rank " + std::to_string(sender) + " sent " + describe(read.sent_bytes, read.sent) +
         ", rank " + std::to_string(receiver) + " receives " +
         describe(read.received_bytes, read.received) + ", tag " + std::to_string(read.tag);
}

std::string Request::describe() const {
  const std::string rank =
      envelope.peer == kAnySource ? std::string("any") : std::to_string(envelope.peer);
  return std::string(name()) + "(" + p2p::describe(envelope.bytes, envelope.element) +
         (receives ? ", src=" : ", dst=") + rank + ", tag=" + std::to_string(envelope.tag) + ")";
}

Engine::Engine(Window& window, Comm& comm, std::shared_ptr<std::atomic<bool>> told,
               std::function<void(const CollectiveError&)> failed, std::optional<OtherNodes> others)
    : forks_(current_forks()),
      others_(std::move(others)),
      node_{window, comm, others_ ? &others_->port : nullptr},
      told_(std::move(told)),
      failed_(std::move(failed)) {
  for (int r = 0; r < comm.size(); ++r) {
    incoming_.emplace_back(node_, matcher_, r);
    outgoing_.emplace_back(node_, r);
  }
  if (others_) streams_.emplace(node_, matcher_, others_->nodes, others_->port);
}

void Engine::serve_device(std::shared_ptr<DeviceCopies> copies) {
  const Lock lock(mutex_);
  const auto [begin, bytes] = copies->slots();
  for (std::int64_t done = 0; done + kSlotBytes <= bytes; done += kSlotBytes) {
    node_.free_slots.push_back(begin + done);
  }
  node_.copies = std::move(copies);
}

void Engine::send_on_device() {
  const Lock lock(mutex_);
  sends_on_device_ = node_.copies != nullptr;
}

// Small messages do not wait for their receivers, so they go through host memory.
bool Engine::reaches(int device, int peer, std::int64_t bytes) {
  const Lock lock(mutex_);
  const bool is_other =
      peer >= 0 && peer < world() && peer != self() && node_.comm.index_of(peer) >= 0;
  return sends_on_device_ && device == node_.copies->device() && bytes > kEagerBytes &&
         (peer == kAnySource || is_other);
}

RequestPtr Engine::make(bool receives, void* data, const Envelope& envelope,
                        const Options& options) {
  PYCOMM_CHECK(
      (receives && envelope.peer == kAnySource) || (envelope.peer >= 0 && envelope.peer < world()),
      std::string(receives ? "src" : "dst") + " must be a rank of the group, from 0 to " +
          std::to_string(world() - 1) + ", got " + std::to_string(envelope.peer));
  PYCOMM_CHECK(is_element(envelope.element) && envelope.bytes >= 0 &&
                   envelope.bytes <= kMostBytes &&
                   (data != nullptr || envelope.bytes == 0 || options.on_device != nullptr),
               "a message must have memory and a known dtype");
  auto request = std::make_shared<Request>();
  request->engine = this;
  request->receives = receives;
  request->data = static_cast<std::byte*>(data);
  request->on_device = static_cast<std::byte*>(options.on_device);
  if (!receives && request->on_device != nullptr) {
    request->ready = node_.copies->mark(options.stream);
  }
  request->envelope = envelope;
  request->peer = envelope.peer;
  request->callback = options.callback;
  request->timeout = options.timeout != Clock::duration{} ? options.timeout : node_.comm.patience();
  request->always_timed = options.always_timed;
  request->told = told_;
  return request;
}

// Posts a request and leaves it to a thread that waits, or to the engine's.
void Engine::start(const RequestPtr& request, bool inline_wait) {
  Lock lock(mutex_);
  const bool failed = node_.comm.aborted() != 0;  // then the request gets the error
  if (ended_ && !failed) throw GroupUnusable("group is closed");
  // Before the request is known to anyone, because this may throw. A small send needs no thread,
  // unless the ring is full; an error then fails the group.
  const bool small_send = !request->receives && request->envelope.bytes <= kEagerBytes;
  if (!inline_wait && !small_send) start_thread();
  const int here = node_.comm.index_of(request->peer);
  if (!request->receives && here >= 0 && here != node_.rank()) {
    outgoing_[static_cast<std::size_t>(here)].open();
  }
  request->number = ++count_;
  node_.requests.add(request);
  guarded(lock, [&] {
    if (node_.comm.aborted() != 0) throw Stopped();
    request->receives ? post_receive(request) : post_send(request);
    return true;
  });
  if (inline_wait || request->completed()) return;
  guarded(lock, [this] { return start_thread(), true; });
  if (resting_) thread_needed_.notify_one();
}

void Engine::start_thread() {
  if (!thread_.joinable()) thread_ = cpu::start_thread([this] { serve(); });
}

void Engine::post_send(const RequestPtr& request) {
  const int here = node_.comm.index_of(request->peer);
  if (here < 0) return streams_->post_send(request);
  if (here == node_.rank()) return send_to_self(request);
  outgoing_[static_cast<std::size_t>(here)].post(request);
}

// A message to this rank waits in private memory, so that it needs no second thread.
void Engine::send_to_self(const RequestPtr& request) {
  const auto& [peer, tag, element, bytes, channel] = request->envelope;
  const Frame frame{0, FrameKind::eager, element, tag, 0, bytes, kNotInWindow, channel};
  if (const RequestPtr receive = matcher_.take_receive(peer, frame)) {
    node_.check_match(peer, frame, *receive);
    if (bytes > 0) std::memcpy(receive->data, request->data, static_cast<std::size_t>(bytes));
    receive->source = peer;
    node_.requests.complete(receive);
  } else {
    matcher_.keep(Arrival{peer, frame, {request->data, request->data + bytes}});
  }
  node_.requests.complete(request);
}

void Engine::post_receive(const RequestPtr& request) {
  std::optional<Arrival> arrival = matcher_.take_arrival(request->envelope);
  if (!arrival) {
    if (streams_) streams_->expect(request->peer);
    return matcher_.keep(request);
  }
  if (arrival->frame.kind == FrameKind::announce) {
    const int here = node_.comm.index_of(arrival->source);
    if (here < 0) return streams_->accept(request, arrival->frame, arrival->source);
    incoming_[static_cast<std::size_t>(here)].accept(request, arrival->frame);
    progress_with(here);
    return;
  }
  node_.check_match(arrival->source, arrival->frame, *request);
  if (!arrival->payload.empty()) {
    std::memcpy(request->data, arrival->payload.data(), arrival->payload.size());
  }
  request->source = arrival->source;
  node_.requests.complete(request);
}

RequestPtr Engine::isend(const void* data, const Envelope& envelope, const Options& options) {
  RequestPtr request = make(false, const_cast<void*>(data), envelope, options);
  start(request, options.waited_for);
  return request;
}

RequestPtr Engine::irecv(void* data, const Envelope& envelope, const Options& options) {
  RequestPtr request = make(true, data, envelope, options);
  start(request, options.waited_for);
  return request;
}

void Engine::send(const void* data, const Envelope& envelope, const Options& options) {
  const RequestPtr request = make(false, const_cast<void*>(data), envelope, options);
  start(request, true);
  wait(*request, options.interrupt);
}

int Engine::recv(void* data, const Envelope& envelope, const Options& options) {
  const RequestPtr request = make(true, data, envelope, options);
  start(request, true);
  wait(*request, options.interrupt);
  return request->source;
}

bool Engine::idle() {
  const Lock lock(mutex_);
  return node_.requests.pending().empty();
}

bool Engine::awaits(int rank) {
  Lock lock(mutex_);
  while (guarded(lock, [this] { return progress(); })) continue;  // what it has sent counts
  for (const RequestPtr& request : node_.requests.pending()) {
    const bool from = request->peer == rank || (request->peer == kAnySource && world() == 2);
    if (request->receives && request->waiters > 0 && from && !request->matched) return true;
  }
  return false;
}

void Engine::close(void (*interrupt)()) {
  std::exception_ptr interrupted;
  Lock lock(mutex_);
  ended_ = true;
  while (!node_.requests.pending().empty()) {
    const RequestPtr request = node_.requests.pending().front();
    lock.unlock();
    try {
      finish(*request, interrupt);
    } catch (...) {
      interrupted = std::current_exception();
    }
    lock.lock();
  }
  changed_.wait(lock, [&] { return waiters_ == 0; });
  stopping_ = true;
  thread_needed_.notify_one();
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  if (interrupted) std::rethrow_exception(interrupted);
}

void Engine::leave() {
  const Lock lock(mutex_);
  ended_ = true;
  if (streams_) streams_->leave(node_.comm.aborted() == 0);
}

}  // namespace pycomm::cpu::p2p

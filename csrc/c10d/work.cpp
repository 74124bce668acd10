#include "c10d/work.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <thread>

#include "c10d/completer.h"

namespace pycomm::c10d {
namespace {

constexpr Milliseconds kInterruptEvery(50);
constexpr std::chrono::microseconds kPollEvery(100);

// What a function of pycomm._C holds until the operation has ended.
template <class T>
struct Reference {
  const Completing completing = {};
  const c10::intrusive_ptr<T> work;
};
template <class T>
using Owner = std::unique_ptr<Reference<T>>;

template <class T>
Owner<T> reference_to(const c10::intrusive_ptr<T>& work) {
  return Owner<T>(new Reference<T>{.work = work});
}

template <class T>
Owner<T> owner_of(void* context) {
  return Owner<T>(static_cast<Reference<T>*>(context));
}

const char* title_of(OpType type) {
  return type == OpType::SEND   ? "pycomm:send"
         : type == OpType::RECV ? "pycomm:recv"
                                : "pycomm:recvAnySource";
}

// Memory for a tensor on a device that no stream uses any more: its own, or some that will be copied
// to it. Undefined if there is none for certain (pycomm/_runtime/cuda.py).
at::Tensor idle_memory(const at::Tensor& tensor, Connection& connection) {
  if (is_plain(tensor) && current_stream(tensor.device()).query()) {
    count_write(tensor);
    return tensor.detach();
  }
  at::assert_no_internal_overlap(tensor);
  const c10::Stream idle = connection.idle_stream(tensor.device());
  const c10::StreamGuard guard(idle);
  const at::Tensor memory = at::empty(tensor.sizes(), tensor.options());
  return idle.query() ? memory : at::Tensor();
}

[[noreturn]] void throw_timed_out(const char* title, Milliseconds timeout) {
  C10_THROW_ERROR(DistBackendError, std::string(title) + " is not complete after " +
                                        std::to_string(timeout.count()) + " ms (Timed out)");
}

}  // namespace

Work::Work(std::shared_ptr<Connection> connection, OpType type, const char* title,
           const Tensors& inputs, std::optional<StreamOrder> order)
    : ::c10d::Work(connection->rank(), type, title, inputs),
      connection_(std::move(connection)),
      order_(std::move(order)),
      title_(title),
      future_(order_ ? std::optional(order_->stream()) : std::nullopt) {}

bool Work::wait(Milliseconds timeout) {
  if (timeout != kNoTimeout) check_timeout(timeout);
  const auto start = std::chrono::steady_clock::now();
  while (!isCompleted()) {
    await(timeout == kNoTimeout ? kInterruptEvery : std::min(timeout, kInterruptEvery));
    if (isCompleted()) break;
    if (const Error error = native().check_waiting(connection_->group()); error != nullptr) {
      abort();
      check(error);
    }
    if (timeout != kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
      throw_timed_out(title_, timeout);
    }
  }
  future_.await();
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  if (order_) order_->block_current_stream();
  return true;
}

void Work::await(Milliseconds patience) {
  std::unique_lock lock(mutex_);
  cv_.wait_for(lock, patience, [&] { return completed_; });
}

void Work::complete(const Tensors& value, const std::exception_ptr& error) {
  future_.complete(value, error);
  finish(error);
}

CollectiveWork::CollectiveWork(std::shared_ptr<Connection> connection, Request request,
                               std::optional<StreamOrder> order)
    : Work(std::move(connection), request.type, request.title, request.inputs, std::move(order)),
      request_(std::move(request)) {}

void CollectiveWork::run() {
  const std::vector<Call>& calls = request_.calls;
  const Error error = native().run(connection_->group(), calls.data(), calls.size());
  finish_request(error == nullptr ? nullptr : as_exception(error));
  if (exception_ != nullptr) std::rethrow_exception(exception_);
}

void CollectiveWork::submit(const c10::intrusive_ptr<CollectiveWork>& work) {
  auto reference = reference_to(work);
  const std::vector<Call>& calls = work->request_.calls;
  check(native().submit(work->connection_->group(), calls.data(), calls.size(),
                        &CollectiveWork::completed, reference.get()));
  reference.release();
}

void CollectiveWork::completed(void* context, Error error) {
  const CallingBack guard;
  const auto owner = owner_of<CollectiveWork>(context);
  owner->work->finish_request(error == nullptr ? nullptr : as_exception(error));
}

void CollectiveWork::finish_request(std::exception_ptr error) {
  try {
    if (error == nullptr && order_) {
      order_->run([&] { request_.copy_results(); });
      request_.record_stream(order_->stream());
    } else if (error == nullptr) {
      request_.copy_results();
    }
    request_.release();
  } catch (...) {
    error = std::current_exception();
  }
  complete(request_.outputs, error);
}

MessageWork::MessageWork(std::shared_ptr<Connection> connection, OpType type,
                         const at::Tensor& tensor, int peer, std::optional<StreamOrder> order)
    : Work(std::move(connection), type, title_of(type), {tensor}, std::move(order)),
      tensor_(tensor),
      peer_(peer),
      receives_(type != OpType::SEND) {
  const bool on_device =
      tensor.is_cuda() && native().reaches(connection_->group(), tensor.device().index(), peer,
                                           static_cast<std::int64_t>(tensor.nbytes()));
  if (on_device && receives_) on_device_ = idle_memory(tensor, *connection_);
  if (on_device && !receives_) on_device_ = plain(tensor, Place::device);
  const Place place = tensor.is_cuda() ? Place::staged : Place::host;
  if (on_device_.defined()) {  // memory that is never written takes none
    if (receives_) on_host_ = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  } else {
    on_host_ = receives_ ? memory_to_write(tensor, place) : plain(tensor, place);
  }
}

MessageWork::~MessageWork() {
  if (request_ != nullptr) native().release_message(request_);
}

void MessageWork::start(const c10::intrusive_ptr<MessageWork>& work, int tag,
                        Milliseconds timeout) {
  const at::Tensor& tensor = work->tensor_;
  Message message{work->receives_,
                  work->peer_,
                  tag,
                  element_of(tensor),
                  static_cast<std::int64_t>(tensor.nbytes()),
                  std::chrono::duration<double>(timeout).count()};
  if (work->on_device_.defined()) {
    message.on_device = work->on_device_.data_ptr();
    const c10::Stream stream = current_stream(tensor.device());
    message.stream = reinterpret_cast<std::uintptr_t>(stream.native_handle());
  }
  void* const data = work->on_host_.defined() ? work->on_host_.data_ptr() : nullptr;
  auto reference = reference_to(work);
  void* request = nullptr;
  check(native().start_message(work->connection_->group(), data, message, &MessageWork::completed,
                               reference.get(), &request));
  reference.release();
  std::unique_lock lock(work->mutex_);
  work->request_ = request;
  if (!work->ended_) return;
  lock.unlock();
  work->finish_message();
}

void MessageWork::completed(void* context) {
  const CallingBack guard;
  const auto owner = owner_of<MessageWork>(context);
  MessageWork& work = *owner->work;
  std::unique_lock lock(work.mutex_);
  work.ended_ = true;
  if (work.request_ == nullptr) return;  // start() will finish the message
  lock.unlock();
  work.finish_message();
}

void MessageWork::finish_message() {
  std::exception_ptr error;
  try {
    check(native().error_of(request_));
    const at::NoGradGuard no_grad;
    const at::Tensor& memory = native().arrived_on_device(request_) ? on_device_ : on_host_;
    const auto copy = [&] { tensor_.detach().copy_(memory, /*non_blocking=*/true); };
    if (!receives_ || memory.is_alias_of(tensor_)) {
      // It is there.
    } else if (order_) {
      order_->run(copy);
      tensor_.record_stream(order_->stream());
      if (on_device_.defined()) on_device_.record_stream(order_->stream());
    } else {
      copy();
    }
  } catch (...) {
    error = std::current_exception();
  }
  complete({tensor_}, error);
}

bool MessageWork::wait(Milliseconds timeout) {
  bool ended = false;
  if (timeout == kNoTimeout) check(native().wait_message(request_, -1, &ended));
  return Work::wait(timeout);
}

void MessageWork::await(Milliseconds patience) {
  bool ended = false;
  const double seconds = std::chrono::duration<double>(patience).count();
  if (const Error error = native().wait_message(request_, seconds, &ended)) {
    as_exception(error);  // finish_message() has got it, too
    ended = true;
  }
  if (ended) Work::await(patience);
}

KernelWork::KernelWork(std::shared_ptr<Connection> connection, Request request, StreamOrder order)
    : ::c10d::Work(connection->rank(), request.type, request.title, request.inputs),
      connection_(std::move(connection)),
      side_(connection_->cuda_side(request.device)),
      request_(std::move(request)),
      order_(std::move(order)),
      future_(order_.stream()) {}

KernelWork::~KernelWork() {
  try {
    release(order_.is_callers());
  } catch (const std::exception&) {  // the device has failed, and its memory with it
  }
}

void KernelWork::enqueue() {
  std::exception_ptr error;
  const auto stream = reinterpret_cast<std::uintptr_t>(order_.stream().native_handle());
  order_.run([&] {
    const std::vector<Call>& calls = request_.calls;
    const Error found = native().enqueue(side_, calls.data(), calls.size(), stream);
    found == nullptr ? request_.copy_results() : void(error = as_exception(found));
  });
  finish(error);  // which ends the profiler's range
  future_.complete(request_.outputs, error);
  if (error != nullptr) std::rethrow_exception(error);
}

bool KernelWork::wait(Milliseconds timeout) {
  if (timeout != kNoTimeout) check_timeout(timeout);
  const bool is_ordered = order_.block_current_stream();
  check(native().check_kernels(side_));
  if (timeout != kNoTimeout) await(timeout);
  release(is_ordered);
  return true;
}

void KernelWork::await(Milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  while (!isCompleted()) {
    std::this_thread::sleep_for(kPollEvery);
    check(native().check_waiting(connection_->group()));
    check(native().check_kernels(side_));
    if (std::chrono::steady_clock::now() - start > timeout)
      throw_timed_out(request_.title, timeout);
  }
  check(native().check_kernels(side_));
}

void KernelWork::release(bool is_ordered) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(released_, true)) return;
  if (!is_ordered) request_.record_stream(order_.stream());
  request_.release();
}

}  // namespace pycomm::c10d

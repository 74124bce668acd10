#include "c10d/work.h"

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
                         const at::Tensor& tensor, Place place, std::optional<StreamOrder> order)
    : Work(std::move(connection), type, title_of(type), {tensor}, std::move(order)),
      tensor_(tensor),
      dense_(type == OpType::SEND ? plain(tensor, place) : memory_to_write(tensor, place)),
      receives_(type != OpType::SEND) {}

MessageWork::~MessageWork() {
  if (request_ != nullptr) native().release_message(request_);
}

void MessageWork::start(const c10::intrusive_ptr<MessageWork>& work, int peer, int tag,
                        Milliseconds timeout) {
  const at::Tensor& dense = work->dense_;
  const Message message{work->receives_,
                        peer,
                        tag,
                        element_of(dense),
                        static_cast<std::int64_t>(dense.nbytes()),
                        std::chrono::duration<double>(timeout).count()};
  auto reference = reference_to(work);
  void* request = nullptr;
  check(native().start_message(work->connection_->group(), dense.data_ptr(), message,
                               &MessageWork::completed, reference.get(), &request));
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
    const auto copy = [&] { tensor_.detach().copy_(dense_, /*non_blocking=*/true); };
    if (receives_ && order_) {
      order_->run(copy);
      tensor_.record_stream(order_->stream());
    } else if (receives_ && !dense_.is_alias_of(tensor_)) {
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
